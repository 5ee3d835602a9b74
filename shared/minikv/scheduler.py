"""Who runs in this step, and with how many tokens?

A step is one pass of the model over a batch. The scheduler fills it under one budget of tokens:
first the running requests, in order, then waiting ones while there is budget and KV memory. A
decoding request asks for one token, a new one for its whole prompt; where the budget ends, a prompt
is cut and goes on in the next step (chunked prefill). So prompts and decodes share steps, and a
long prompt does not make the others wait for its end.

When a running request needs a block and none is free, the scheduler takes back all blocks of
another (preemption): of the last admitted under "fcfs", of the worst (priority, arrival) under
"priority". The victim keeps its tokens, waits at the head of the queue, and when it is admitted
again computes anew what the prefix cache has lost meanwhile.

This file knows no tensors: it can be run, tested and simulated without a model. By what cached
blocks are found, and when they are published, is the cache's choice (`KVManager`).

The rules are those of vLLM 0.32.0, v1/core/sched/scheduler.py (`schedule`, `_preempt_request`,
`update_from_output`) and v1/core/sched/utils.py (`check_stop`), with one exception that is told at
`_preempt`, and SGLang's at `_stands_back`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from minikv.blocks import KVCacheManager
from minikv.radix import RadixKVCacheManager
from minikv.request import Request, RequestStatus

POLICIES = ("fcfs", "priority")

PrefixCache = Literal["hash", "radix"]


class KVManager(Protocol):
    """Block tables over one pool: what the scheduler asks of `blocks.py` and `radix.py`.

    A request is its id here. `key` says under what its tokens are found; what it returns, and what
    `match` returns, are the cache's own and only handed back to it.
    """

    block_size: int
    num_blocks: int
    """With the null block."""
    caching: bool
    publishes_early: bool
    """Whether blocks are published before they are computed, so that requests of one step share."""

    @property
    def num_free(self) -> int: ...
    def key(self, token_ids: Sequence[int], salt: str | None, hashes: list[bytes]) -> Any: ...
    def match(self, key: Any, num_tokens: int) -> Any: ...
    def allocate(
        self, request_id: str, num_tokens: int, hits: Any = ..., must_fit: int = 0
    ) -> bool: ...
    def publish(self, request_id: str, key: Any, num_tokens: int) -> None: ...
    def release(self, request_id: str, num_computed_tokens: int) -> None: ...
    def block_ids(self, request_id: str) -> list[int]: ...
    def reset(self) -> bool: ...


def make_kv(num_blocks: int, block_size: int, prefix_cache: PrefixCache | None) -> KVManager:
    """The block tables for a kind of prefix cache; None: nothing is found again."""
    if prefix_cache not in ("hash", "radix", None):
        raise ValueError(f"prefix_cache must be 'hash', 'radix' or None; got {prefix_cache!r}")
    if prefix_cache == "radix":
        return RadixKVCacheManager(num_blocks, block_size)
    return KVCacheManager(num_blocks, block_size, prefix_cache == "hash")


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's share of a step: tokens start .. start + num_tokens - 1 of its token list.

    block_ids: its block table, with slots for all tokens up to the last of them.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: list[int]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Does the share reach the request's last token, so that the next one can be sampled?"""
        return self.end == self.request.num_tokens

    @property
    def is_decode(self) -> bool:
        """One token, and that one sampled in an earlier step; everything else is prefill."""
        sampled = self.start >= self.request.num_prompt_tokens
        return sampled and self.samples and self.num_tokens == 1


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `admitted` holds, for each request that entered, its hit in the prefix cache."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation.

    kv: the block tables, shared with nobody else.
    max_model_len: tokens of prompt and output that one request may have.
    max_num_batched_tokens: the token budget of a step.
    max_num_seqs: requests that may run at the same time.
    long_prefill_token_threshold: while more than one request is there, none gets more tokens than
        this in a step; 0 switches it off.
    policy: "fcfs" or "priority".

    The caller guarantees that a request of max_model_len tokens fits the pool; otherwise it could
    be preempted and admitted for ever (`LLM` checks it).
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_model_len: int,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        long_prefill_token_threshold: int = 0,
        policy: str = "fcfs",
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"scheduling_policy must be one of {POLICIES}; got {policy!r}")
        for name, value in (
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_num_seqs", max_num_seqs),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if long_prefill_token_threshold < 0:
            raise ValueError(
                "long_prefill_token_threshold must be 0 (off) or more; "
                f"got {long_prefill_token_threshold}"
            )
        self.kv = kv
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.policy = policy
        self.waiting: list[Request] = []  # head first; sorted under "priority"
        self.running: list[Request] = []  # in order of admission

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Put a new request into the queue."""
        self._enqueue(request, at_head=False)

    def schedule(self) -> SchedulerOutput:
        """Decide the next step and reserve its KV slots.

        The caller runs the step, then calls `update`; or, if the step fails, `finish` for each
        scheduled request. A step can be empty: when a request took its own blocks back before
        anyone else had a share.
        """
        out = SchedulerOutput()
        shares: dict[Request, ScheduledRequest] = {}
        budget = self._schedule_running(shares, out)
        # A step that preempted admits nobody: it would give away the blocks just taken back.
        if not out.preempted:
            self._schedule_waiting(shares, out, budget)
        out.scheduled = list(shares.values())
        return out

    def _schedule_running(
        self, shares: dict[Request, ScheduledRequest], out: SchedulerOutput
    ) -> int:
        """Give the running requests their tokens; returns what is left of the budget."""
        budget = self.max_num_batched_tokens
        threshold = self._prefill_threshold()
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = self._chunk(
                request.num_tokens - request.num_computed_tokens, threshold, budget
            )
            end = request.num_computed_tokens + num_tokens
            while not self.kv.allocate(request.request_id, end):
                victim = self._choose_victim()
                victim_index = self.running.index(victim)
                del self.running[victim_index]
                if victim_index < index:  # only under "priority": it had its share already
                    index -= 1
                if victim in shares:
                    budget += shares.pop(victim).num_tokens
                self._preempt(victim)
                out.preempted.append(victim)
                if victim is request:
                    return budget
            self._grant(request, num_tokens, shares)
            budget -= num_tokens
            index += 1
        return budget

    def _schedule_waiting(
        self, shares: dict[Request, ScheduledRequest], out: SchedulerOutput, budget: int
    ) -> None:
        """Admit requests from the head of the queue until something runs out.

        One that does not fit is not overtaken by a smaller one behind it; one that stands back is.
        """
        threshold = self._prefill_threshold()
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[index]
            hits = self.kv.match(self._key(request), request.num_tokens)
            num_cached = len(hits) * self.kv.block_size
            if self._stands_back(request, num_cached, shares):
                index += 1
                continue
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
            # The count is taken after the hit: what is cached uses no budget.
            num_tokens = self._chunk(request.num_tokens - num_cached, threshold, budget)
            if not self.kv.allocate(
                request.request_id, num_cached + num_tokens, hits, must_fit=request.num_tokens
            ):
                break
            self.running.append(self.waiting.pop(index))
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_cached
            out.admitted[request.request_id] = num_cached
            self._grant(request, num_tokens, shares)
            budget -= num_tokens

    def update(
        self, out: SchedulerOutput, tokens: Mapping[str, int], logprobs: Mapping[str, float]
    ) -> list[Request]:
        """Account for a step that has run; returns the requests that it finished.

        tokens, logprobs: by request id, for every share that samples.
        """
        finished = []
        for share in out.scheduled:
            request = share.request
            request.num_computed_tokens = share.end
            if not self.kv.publishes_early and not share.is_decode:
                self.kv.publish(request.request_id, self._key(request), share.end)
            if request.request_id not in tokens:
                continue
            request.token_ids.append(tokens[request.request_id])
            request.logprobs.append(logprobs[request.request_id])
            status = self._check_stop(request)
            if status is not None:
                self.finish(request, status)
                finished.append(request)
        return finished

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request in any state and free its blocks; what it computed stays in the cache."""
        if request.status.finished:
            return
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        queue.remove(request)
        request.status = status
        if not self.kv.publishes_early:  # the output too: a follow-up question begins with it
            self.kv.publish(request.request_id, self._key(request), request.num_computed_tokens)
        self.kv.release(request.request_id, request.num_computed_tokens)

    def _stands_back(
        self, request: Request, num_cached: int, shares: dict[Request, ScheduledRequest]
    ) -> bool:
        """Is more of the request's beginning being computed in this step than the cache holds?

        Where blocks are published late, it then waits for them and is not computed twice, and
        those behind it may go first. (SGLang 0.5.23, srt/managers/schedule_policy.py,
        `_compute_prefix_matches`: there for beginnings of more than 32 tokens.)
        """
        if self.kv.publishes_early or not self.kv.caching:
            return False
        size = self.kv.block_size
        usable = (request.num_tokens - 1) // size * size
        for share in shares.values():
            other = share.request
            end = min(usable, share.end // size * size)
            if (
                num_cached < end
                and other.cache_salt == request.cache_salt
                and not share.is_decode
                # One block more than the cache holds is reason enough to wait.
                and other.token_ids[: num_cached + size] == request.token_ids[: num_cached + size]
            ):
                return True
        return False

    def _prefill_threshold(self) -> int:
        """The threshold keeps a long prompt from starving others: alone, nobody is starved."""
        alone = len(self.running) + len(self.waiting) <= 1
        return 0 if alone else self.long_prefill_token_threshold

    @staticmethod
    def _chunk(num_missing: int, threshold: int, budget: int) -> int:
        """How many of its missing tokens a request gets in this step."""
        return min(num_missing, threshold or num_missing, budget)

    def _grant(
        self, request: Request, num_tokens: int, shares: dict[Request, ScheduledRequest]
    ) -> None:
        start = request.num_computed_tokens
        if self.kv.publishes_early:
            # Before it is computed, so that the next request in this very step can share it. That
            # is sound because a layer writes the keys and values of the whole batch before any
            # query of the batch reads them (`attention/paged.py`).
            self.kv.publish(request.request_id, self._key(request), start + num_tokens)
        block_ids = self.kv.block_ids(request.request_id)
        shares[request] = ScheduledRequest(request, start, num_tokens, block_ids)

    def _choose_victim(self) -> Request:
        if self.policy == "priority":
            return max(self.running, key=lambda r: (r.priority, r.arrival))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Take all blocks back; the request, no longer in `running`, waits to be admitted again.

        Under "priority" the victim may have had a share of this very step, whose blocks are then
        published but will not be computed. vLLM 0.32.0 leaves their hashes in the cache, and the
        victim itself would hit them; `release` takes them out.
        """
        self.kv.release(request.request_id, request.num_computed_tokens)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._enqueue(request, at_head=True)

    def _enqueue(self, request: Request, at_head: bool) -> None:
        if self.policy == "priority":
            insort(self.waiting, request)
        else:
            self.waiting.insert(0 if at_head else len(self.waiting), request)

    def _key(self, request: Request) -> Any:
        """Under what the cache finds the tokens that the request has now."""
        return self.kv.key(request.token_ids, request.cache_salt, request.block_hashes)

    def _check_stop(self, request: Request) -> RequestStatus | None:
        """Length comes last: an end-of-sequence token in the last place counts as a stop."""
        token, params = request.token_ids[-1], request.params
        if token in params.stop_token_ids:
            return RequestStatus.FINISHED_STOPPED
        if token in request.eos_token_ids and not params.ignore_eos:
            return RequestStatus.FINISHED_STOPPED
        num_output_tokens = request.num_tokens - request.num_prompt_tokens
        if num_output_tokens >= params.max_tokens or request.num_tokens >= self.max_model_len:
            return RequestStatus.FINISHED_LENGTH_CAPPED
        return None
