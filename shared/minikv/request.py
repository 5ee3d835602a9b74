"""What is one request, and in which state is it?

A request is a list of tokens and one number. The list starts as the prompt and grows by one token
each time the model samples; the number, `num_computed_tokens`, says for how many of them the KV
cache holds keys and values. Serving the request means letting the number catch up with the list:
there is no "prefill phase" and no "decode phase", only a gap that is wide at first and one token
wide later (vLLM 0.32.0, v1/core/sched/scheduler.py, note at the head of `schedule`).

    WAITING ──admitted──▶ RUNNING ──▶ FINISHED_STOPPED | _LENGTH_CAPPED | _ABORTED
                          │     ▲
                      preempted └──admitted again, num_computed_tokens from the prefix cache
                          ▼     │
                         PREEMPTED (its blocks are gone, its tokens are not)
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an int, from numpy or torch too; ValueError for what is none, or is too small."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number; got {value!r}")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Names and defaults are those of vLLM.

    temperature: 0 is greedy; otherwise logits are divided by it before the softmax. Above 0 it is
        0.01 at least: smaller ones are raised to that, as vLLM does.
    top_p: sample only from the smallest set of most likely tokens that holds this much mass.
    max_tokens: output tokens at most, at least 1. The context window may end it earlier.
    seed: of the request's own generator, 0 or more. Its numbers depend neither on what the request
        is batched with, nor on chunking or preemption. The logits do, a little, by rounding (in
        bf16 more than in float32), so a close call can fall the other way. None: the engine gives
        each request a seed of its own.
    stop: strings; the text ends before the first that appears.
    stop_token_ids: token ids that end the output; in `token_ids`, not in the text. None, vLLM's
        default, does for both.
    ignore_eos: go on after the model's end-of-sequence token.

    Raises ValueError for a value out of range or of another kind.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature, top_p = self.temperature, self.top_p
        if not (is_number(temperature) and math.isfinite(temperature) and temperature >= 0):
            raise ValueError(
                f"temperature must be a finite number, 0 (greedy) or more; got {temperature!r}"
            )
        if not (is_number(top_p) and 0 < top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1], 1 keeps every token; got {top_p!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be non-empty strings; got {self.stop!r}")
        set_value = functools.partial(object.__setattr__, self)  # the way into a frozen dataclass
        set_value("temperature", max(temperature, 0.01) if temperature else 0.0)
        set_value("max_tokens", whole_number("max_tokens", self.max_tokens, least=1))
        if self.seed is not None:
            set_value("seed", whole_number("seed", self.seed, least=0))
        set_value("stop", stop)
        ids = tuple(whole_number("stop_token_ids", i, least=0) for i in self.stop_token_ids or ())
        set_value("stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class RequestStatus(Enum):
    """The value is the finish reason that the client is told, None while there is none."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(eq=False, kw_only=True)
class Request:
    """One request as the scheduler and the runner see it: token ids, no text.

    token_ids: prompt, then output.
    num_computed_tokens: how many of them have keys and values in the KV cache (after each step).
    num_cached_tokens: how many the first admission found in the prefix cache, without computing.
    block_hashes: one for each full block of `token_ids`, see `blocks.py`; empty without caching.
    arrival: order of arrival; ties in `priority` (smaller runs first) are broken by it.
    rng: gives one uniform number for each sampled token.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    rng: random.Random = field(default_factory=random.Random)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str | None = None

    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __lt__(self, other: Request) -> bool:
        """Order of service under the "priority" policy (vLLM, v1/request.py, `__lt__`)."""
        return (self.priority, self.arrival, self.request_id) < (
            other.priority,
            other.arrival,
            other.request_id,
        )


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What the client gets: everything so far, or everything once `finish_reason` is set.

    text: the decoded output; no half character and nothing from a stop string on.
    token_ids: output tokens, the one that ended it included.
    logprobs: for each of them its log-probability under the model's own distribution, before
        temperature and top_p (vLLM's "raw_logprobs").
    cached_tokens: prompt tokens found in the prefix cache at the first admission.
    finish_reason: "stop" (end-of-sequence or a stop), "length" (max_tokens or the context window),
        "abort", or None while it runs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    finish_reason: str | None
    num_preemptions: int

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One step's worth of a streamed output: what is new since the piece before.

    The text can be empty although there is a token: half a character, or what may turn out to be
    the beginning of a stop string, is held back until it is decided. How many tokens the prompt
    has, and how many of them were found in the prefix cache, stand in every piece.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
