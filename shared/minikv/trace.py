"""What did a step do, what did it cost, and what would the scheduler do without a model?

A `Step` is a scheduled step as plain data: ids and numbers, no tensors and no live objects, so it
can be kept, compared and drawn. `Stats` are the counts over all steps.

`dry_run` drives the scheduler alone. To decide who runs in a step it needs to know how many tokens
a request has, not which; so a prompt can be a mere number, and no weights are loaded. Thousands of
steps take a second, and each can be predicted by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from minikv.request import Request, SamplingParams
from minikv.scheduler import PrefixCache, Scheduler, SchedulerOutput, make_kv


@dataclass
class Stats:
    """What the engine has done since it was made or since `reset`.

    steps: passes of the model over a scheduled batch.
    token_forwards: tokens that went through the model, in steps and in `LLM.forward`.
    prefill_tokens, decode_tokens: those of the steps, by kind.
    preemptions: how often a request lost its blocks.
    prefix_cache_queries, prefix_cache_hits: tokens looked up and found when requests were admitted
        for the first time (as vLLM counts them).
    copied_bytes: of keys and values, copied by attention because they lie scattered in blocks.
    peak_blocks: most blocks that were in use in one step.
    """

    steps: int = 0
    token_forwards: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    copied_bytes: int = 0
    peak_blocks: int = 0

    def reset(self) -> None:
        for item in fields(self):
            setattr(self, item.name, item.default)

    def count(self, step: Step, out: SchedulerOutput, scheduler: Scheduler) -> None:
        """Add a step that has run; before `Scheduler.update`, which changes its requests."""
        kv = scheduler.kv
        prefill, decode = sum(step.prefill.values()), sum(step.decode.values())
        self.steps += bool(out.scheduled)
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.token_forwards += prefill + decode
        self.preemptions += len(out.preempted)
        for share in out.scheduled:
            request = share.request
            first = request.request_id in out.admitted and request.num_preemptions == 0
            if first and kv.caching:
                self.prefix_cache_queries += request.num_tokens
                self.prefix_cache_hits += out.admitted[request.request_id]
        self.peak_blocks = max(self.peak_blocks, kv.num_blocks - 1 - kv.num_free)


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was scheduled, in request ids and numbers only.

    index: counts all steps from 0.
    prefill, decode: tokens given to each request, in the order of the batch; a request is in one.
    cached: for each request admitted in this step, the tokens found in the prefix cache.
    preempted, waiting: requests that lost their blocks, by id; the queue after scheduling.
    blocks: the block table of each scheduled request.
    free_blocks: free after scheduling.
    """

    index: int
    prefill: dict[str, int]
    decode: dict[str, int]
    cached: dict[str, int]
    preempted: tuple[str, ...]
    waiting: tuple[str, ...]
    blocks: dict[str, tuple[int, ...]]
    free_blocks: int

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens given to each request, whatever their kind."""
        return self.prefill | self.decode


def as_step(index: int, out: SchedulerOutput, scheduler: Scheduler) -> Step:
    """Write a step down; before `Scheduler.update`, which changes its requests."""
    return Step(
        index=index,
        prefill={s.request.request_id: s.num_tokens for s in out.scheduled if not s.is_decode},
        decode={s.request.request_id: s.num_tokens for s in out.scheduled if s.is_decode},
        cached=out.admitted,
        preempted=tuple(sorted(r.request_id for r in out.preempted)),
        waiting=tuple(r.request_id for r in scheduler.waiting),
        blocks={s.request.request_id: tuple(s.block_ids) for s in out.scheduled},
        free_blocks=scheduler.kv.num_free,
    )


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a dry run.

    prompt: its token ids, or just how many; then no other request has the same.
    output: tokens that it generates, at least 1.
    step: the step before which it arrives; those of one step arrive in the order of the list.
    priority: smaller is served first, under policy "priority".
    """

    id: str
    prompt: int | Sequence[int]
    output: int
    step: int = 0
    priority: int = 0


def made_up_prompts(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Token ids for each arrival; numbers that stand for no token, so that no two are alike."""
    return [
        list(a.prompt) if not isinstance(a.prompt, int) else [-1 - i] * a.prompt
        for i, a in enumerate(arrivals)
    ]


def dry_run(
    arrivals: Sequence[Arrival],
    *,
    num_blocks: int = 1024,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
    long_prefill_token_threshold: int = 0,
    policy: str = "fcfs",
    prefix_cache: PrefixCache | None = None,
    max_steps: int = 10_000,
) -> list[Step]:
    """Schedule the requests to their ends, without a model; every sampled token is 0.

    The other arguments are those of `LLM`; num_blocks has the null block in it. Steps in which
    nobody is there are left out, their numbers too. Raises ValueError for a request that the pool
    can never hold, and RuntimeError if the end is not reached in `max_steps`.
    """
    usable = (num_blocks - 1) * block_size
    scheduler = Scheduler(
        make_kv(num_blocks, block_size, prefix_cache),
        max_model_len=usable,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=policy,
    )
    coming = []
    order = sorted(zip(arrivals, made_up_prompts(arrivals), strict=True), key=lambda a: a[0].step)
    for number, (arrival, prompt) in enumerate(order):
        if not prompt or len(prompt) + arrival.output > usable:
            raise ValueError(
                f"request {arrival.id!r} has {len(prompt)} + {arrival.output} tokens; a prompt has "
                f"at least one, and the {num_blocks - 1} usable blocks hold {usable} in all"
            )
        params = SamplingParams(temperature=0, max_tokens=arrival.output, ignore_eos=True)
        request = Request(
            request_id=arrival.id,
            token_ids=prompt,
            params=params,
            priority=arrival.priority,
            arrival=number,
        )
        coming.append((arrival.step, request))
    coming.reverse()

    steps: list[Step] = []
    for index in range(max_steps):
        while coming and coming[-1][0] <= index:
            scheduler.add(coming.pop()[1])
        if not scheduler.has_unfinished:
            if not coming:
                return steps
            continue
        out = scheduler.schedule()
        steps.append(as_step(index, out, scheduler))
        sampled = [share.request.request_id for share in out.scheduled if share.samples]
        scheduler.update(out, dict.fromkeys(sampled, 0), dict.fromkeys(sampled, 0.0))
    raise RuntimeError(f"not done after {max_steps} steps")
