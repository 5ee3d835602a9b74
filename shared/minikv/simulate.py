"""How would these requests fare, if a step took so long? The scheduler on a virtual clock.

A model is slow, and what a scheduler decides depends on it only through time: who has arrived when
the next step is put together, and when a step ends. So the model is replaced by a `Cost`, a few
seconds for each step and each token in it, measured or given; scheduler, block tables and prefix
cache are the real ones (`scheduler.py`, `blocks.py`, `radix.py`). An hour of traffic takes seconds,
and the same requests can be sent again with another budget, pool or policy.

What it cannot say is what `Cost` leaves out: kernels that are slow for odd shapes, the host's own
work, the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from minikv.request import Request, SamplingParams
from minikv.scheduler import PrefixCache, Scheduler, SchedulerOutput, make_kv


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: a part for the step itself, and one for each token in it."""

    step: float
    prefill_token: float
    decode_token: float
    context_token: float = 0.0
    """For each token whose keys and values are read: those before and in each request's share."""

    def seconds(self, out: SchedulerOutput) -> float:
        total = self.step
        for share in out.scheduled:
            each = self.decode_token if share.is_decode else self.prefill_token
            total += each * share.num_tokens + self.context_token * share.end
        return total


@dataclass(frozen=True)
class Sent:
    """A request of the simulation; `at` is in seconds from the start."""

    at: float
    prompt: Sequence[int]
    output: int


@dataclass
class Served:
    """What became of a request, in virtual seconds."""

    at: float
    first_token: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """found in the prefix cache when it was first admitted"""
    preemptions: int = 0


@dataclass
class Simulated:
    """All requests in the order in which they were sent, and what the engine did for them."""

    served: list[Served] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    """when the last step ended"""
    computed_tokens: int = 0


def simulate(
    sent: Iterable[Sent],
    cost: Cost,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 128,
    long_prefill_token_threshold: int = 0,
    policy: str = "fcfs",
    prefix_cache: PrefixCache | None = "hash",
) -> Simulated:
    """Serve the requests, given in the order of their moments; the settings are those of `LLM`.

    Raises ValueError for moments out of order, or a request that the pool can never hold.
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
    result = Simulated()
    served: dict[str, Served] = {}
    now = 0.0
    coming = _requests(sent, usable)
    at, request = next(coming, (0.0, None))
    while request is not None or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, at)  # nobody is there: the clock goes on to the next arrival
        while request is not None and at <= now:
            served[request.request_id] = Served(at, prompt_tokens=request.num_tokens)
            result.served.append(served[request.request_id])
            scheduler.add(request)
            at, request = next(coming, (0.0, None))
        out = scheduler.schedule()
        now += cost.seconds(out)
        result.steps += 1
        for share in out.scheduled:
            result.computed_tokens += share.num_tokens
        for victim in out.preempted:
            served[victim.request_id].preemptions += 1
        for name, cached in out.admitted.items():
            if not served[name].preemptions:
                served[name].cached_tokens = cached
        sampled = [share.request.request_id for share in out.scheduled if share.samples]
        for name in sampled:
            served[name].first_token = served[name].first_token or now
        for done in scheduler.update(out, dict.fromkeys(sampled, 0), dict.fromkeys(sampled, 0.0)):
            served[done.request_id].finished = now
    result.seconds = now
    return result


def _requests(sent: Iterable[Sent], usable: int) -> Iterator[tuple[float, Request]]:
    before = 0.0
    for number, one in enumerate(sent):
        if one.at < before:
            raise ValueError(f"request {number} comes at {one.at}, after one at {before}")
        before = one.at
        if not one.prompt or one.output < 1 or len(one.prompt) + one.output > usable:
            raise ValueError(
                f"request {number} has {len(one.prompt)} + {one.output} tokens; it has one of each "
                f"at least, and the pool holds {usable} in all"
            )
        params = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True)
        yield (
            one.at,
            Request(
                request_id=str(number), token_ids=list(one.prompt), params=params, arrival=number
            ),
        )
