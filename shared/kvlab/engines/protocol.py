"""What every engine of the course understands, whatever runs behind it.

`Engine` is the protocol that notebooks speak: vLLM, SGLang, a pair of servers that splits prefill
and decode, a router with replicas behind it, and minikv in this process answer the same calls. What
an engine has besides (vLLM's counters, HiCache's tiers) its own module adds.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, Self, SupportsIndex, TypedDict, Unpack, cast, overload

Prompt = str | list[int]
"""Text, or the token ids themselves."""
Prompts = list[str] | list[list[int]]


@dataclass(frozen=True)
class Completion:
    """What an engine gave back for one prompt."""

    text: str
    token_ids: list[int]
    """The new tokens; the prompt's are not among them."""
    logprobs: list[float]
    """Natural log-probability of each new token, from the raw logits; same length."""
    prompt_tokens: int
    cached_tokens: int
    """How many of the prompt's tokens were not computed because their KV was in a cache."""
    finish_reason: str
    """"length" (max_tokens reached) or "stop" (end-of-sequence token or stop string)."""


@dataclass(frozen=True)
class Chunk:
    """What a stream brought since the chunk before; the last one also says how it ended."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class EngineError(RuntimeError):
    """An engine cannot do what was asked; the message says why and what to do.

    `log` is the engine's log file where one was written.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class Options(TypedDict, total=False):
    """How to complete a prompt; what every engine understands."""

    max_tokens: int
    """New tokens at most; 16 unless said otherwise."""
    temperature: float
    """0, the default, is greedy."""
    top_p: float
    seed: int | None
    """SGLang and what stands before it refuse one."""
    stop: str | list[str]
    """The text ends before the first of these that appears."""
    ignore_eos: bool
    """Go on after the model's end-of-sequence token."""
    cache_salt: str | None
    """Requests with the same salt share cached KV, those with different ones do not. It has at
    least one character: vLLM 0.32.0 refuses "", SGLang 0.5.23 and minikv take it for none."""


class Counting(Protocol):
    """Whatever has counters."""

    def metrics(self) -> dict[str, float]: ...


class Engine(Protocol):
    """The calls that a notebook makes on any engine. All raise EngineError."""

    @property
    def is_alive(self) -> bool: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Completion]: ...
    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Chunk]: ...
    def metrics(self) -> dict[str, float]: ...
    def reset_prefix_cache(self) -> bool: ...
    def restart(self) -> Self: ...
    def stop(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def is_one(prompt: object) -> bool:
    """Whether it is one prompt: text or token ids. Raises EngineError if it is no list either."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, (list, tuple)):
        raise EngineError(_NO_PROMPT.format(prompt))
    return len(prompt) > 0 and all(hasattr(part, "__index__") for part in prompt)


def only(prompt: Prompt) -> Prompt:
    """The prompt, if it is one; else raises EngineError."""
    if not is_one(prompt):
        raise EngineError("stream() takes one prompt; generate() takes several.")
    return prompt


def checked_salt(salt: object) -> str | None:
    """The salt, if it is one or None; else raises EngineError."""
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise EngineError(f"A cache_salt is a text that is not empty, or None, and not {salt!r:.80}.")


def whole(name: str, value: object, least: int = 1) -> int:
    """The value, if it is a whole number from `least` on; else raises EngineError that names it."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):  # numpy's, too
        number = operator.index(cast(SupportsIndex, value))
        if number >= least:
            return number
    raise EngineError(f"{name} is a whole number from {least} on, and not {value!r:.80}.")


def complete(
    prompt: Prompt | Prompts, one: Callable[[Prompt], Completion]
) -> Completion | list[Completion]:
    """One prompt's completion, or those of several in their order, up to 256 asked at the same
    time.

    Raises EngineError for what is no prompt, and the first error of `one`: then, and with Ctrl-C,
    it does not wait for the others.
    """
    if is_one(prompt):
        return one(cast(Prompt, prompt))
    many = cast(list[Prompt], list(prompt))
    if not all(is_one(item) for item in many):
        raise EngineError(_NO_PROMPT.format(prompt))
    waiting = deque(enumerate(many))
    answered: SimpleQueue[tuple[int, Completion | BaseException]] = SimpleQueue()

    def ask() -> None:
        while True:
            try:
                place, prompt = waiting.popleft()
            except IndexError:
                return
            try:
                answered.put((place, one(prompt)))
            except BaseException as error:
                answered.put((place, error))

    # Daemons, for Python waits for other threads when it exits, however long an engine is silent.
    # concurrent.futures has none.
    for _ in range(min(len(many), _AT_ONCE)):
        Thread(target=ask, daemon=True).start()
    answers: dict[int, Completion] = {}
    try:
        while len(answers) < len(many):
            place, answer = answered.get()
            if isinstance(answer, BaseException):
                raise answer
            answers[place] = answer
    finally:
        waiting.clear()
    return [answers[place] for place in range(len(many))]


_AT_ONCE = 256
_NO_PROMPT = "A prompt is a text or a list of token ids, and not {!r:.80}."
