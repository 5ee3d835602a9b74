"""What every engine of the course understands, whatever runs behind it.

`Engine` is the protocol that notebooks speak: vLLM, SGLang, a pair of servers that splits prefill
and decode, a router with replicas behind it, and minikv in this process answer the same calls. What
an engine has besides (vLLM's counters, HiCache's tiers) its own module adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, overload

Prompt = str | list[int]
"""Text, or the token ids themselves."""


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


class Engine(Protocol):
    """The calls that a notebook makes on any engine."""

    @overload
    def generate(self, prompt: Prompt, *, max_tokens: int = ...) -> Completion: ...
    @overload
    def generate(self, prompt: list[Prompt], *, max_tokens: int = ...) -> list[Completion]: ...
    def stream(self, prompt: Prompt, *, max_tokens: int = ...) -> Iterator[Chunk]: ...
    def metrics(self) -> dict[str, float]: ...
    def reset_prefix_cache(self) -> bool: ...
    def stop(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
