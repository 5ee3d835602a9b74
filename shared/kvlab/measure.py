"""What a run says, and what it does not.

    from kvlab import load, measure

    with measure.counting(engine) as counted:
        run = load.send(engine, workload)
    measure.show(run)
    print(counted.by_source())

Every figure has a definition that stands in a docstring here, with the mistake that it avoids.
Times are in seconds until a table shows milliseconds. Of a failed request nothing enters a latency;
that it failed is a figure of its own, and misses every objective.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvlab import report
from kvlab.engines.generating import GeneratingServer
from kvlab.engines.protocol import Counting, EngineError
from kvlab.load import Outcome, Run

T = TypeVar("T")

# One request.


def lateness(one: Outcome) -> float:
    """How long the client itself kept a request that was due.

    Avoids: taking a client that cannot keep up for a server that is slow. If this is not small
    beside the latencies, nothing else here is about the server.
    """
    return one.sent - one.due


def ttft(one: Outcome) -> float | None:
    """Time to first token: from when the request was *due* to its first token.

    Avoids *coordinated omission*: counted from when it was sent, a request that waited in the
    client looks fast, and the worse the load, the better it looks. None without a token.
    """
    return one.times[0] - one.due if one.times else None


def itl_by_chunk(one: Outcome) -> list[float]:
    """Inter-token latency as a user sees it: the gaps between chunks of the stream.

    Avoids: hiding a pause of a second by dividing it among the tokens that came after it. A chunk
    may hold several tokens; then this is not the time of one token.
    """
    return np.diff(one.times).tolist()


def itl_by_token(one: Outcome) -> list[float]:
    """Inter-token latency for each token: a chunk's gap, shared among the tokens that it holds.

    Avoids: a server that sends four tokens at a time looking four times as slow, or, counted by
    chunks, half of its tokens not counting. The first chunk's further tokens came with its first:
    0 each. The mean over a request is its TPOT.
    """
    gaps = [0.0] * (one.tokens[0] - 1) if one.tokens else []
    for gap, tokens in zip(itl_by_chunk(one), one.tokens[1:], strict=True):
        gaps += [gap / tokens] * tokens
    return gaps


def tpot(one: Outcome) -> float | None:
    """Time per output token: from the first to the last, divided by the tokens after the first.

    Avoids: dividing by all tokens, or putting the prefill into it. None for a single token. It is
    a mean: pauses of single tokens vanish in it, for which there is ITL.
    """
    tokens = sum(one.tokens)
    return (one.times[-1] - one.times[0]) / (tokens - 1) if tokens > 1 else None


def end_to_end(one: Outcome) -> float | None:
    """From when the request was due to its last token. Avoids what `ttft` avoids."""
    return one.times[-1] - one.due if one.times else None


# Many requests.


@dataclass(frozen=True)
class Estimate:
    """A percentile, and how far to trust it."""

    percent: float
    value: float
    low: float
    high: float
    """between these lie 95% of what one gets from the same requests, drawn anew: see percentile"""
    count: int
    """of requests behind it"""

    @property
    def carries(self) -> bool:
        """Whether ten requests or more are expected beyond it. The P99 of 200 hangs on two. (Of
        gaps more lie beyond, but of how many requests are they?)"""
        return self.count * (1 - self.percent / 100) >= 10 - 1e-9

    def __str__(self) -> str:
        said = f"{1000 * self.value:.1f} [{1000 * self.low:.1f}, {1000 * self.high:.1f}]"
        return said if self.carries else f"{said} ?"


def percentile(
    by_request: Sequence[Sequence[float]], percent: float, *, draws: int = 400, seed: int = 0
) -> Estimate | None:
    """A percentile of all values, with an interval from the bootstrap. None without a value.

    Requests are drawn, not values. Avoids: the gaps of one answer taken for independent, which
    makes an interval look several times too narrow. It takes the *requests* for independent, and
    in a queue neighbours are not: under load the truth lies outside far more often than one
    time in twenty. Only more runs, with other seeds, say how much two runs differ.
    """
    groups = [np.asarray(values, dtype=float) for values in by_request if len(values)]
    if not groups:
        return None
    rng = np.random.default_rng(seed)
    values = np.concatenate(groups)
    # Sorted once: each draw then says how often each value is there.
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[order]
    found = []
    for drawn in rng.integers(len(groups), size=(draws, len(groups))):
        upto = np.cumsum(np.bincount(drawn, minlength=len(groups))[owner])
        place = (upto[-1] - 1) * percent / 100  # as np.percentile has it: between two neighbours
        ranks = [np.floor(place), np.ceil(place)]
        before, behind = ranked[np.searchsorted(upto, ranks, side="right")]
        found.append(before + (behind - before) * (place % 1))
    low, high = np.percentile(found, (2.5, 97.5))
    value = np.percentile(values, percent)
    return Estimate(percent, float(value), float(low), float(high), len(groups))


Values = Callable[[Outcome], float | list[float] | None]

LATENCIES: dict[str, Values] = {
    "TTFT": ttft,
    "ITL by token": itl_by_token,
    "ITL by chunk": itl_by_chunk,
    "TPOT": tpot,
    "end to end": end_to_end,
    "client's lateness": lateness,
}


def latency(run: Run, what: Values, percent: float) -> Estimate | None:
    """A percentile of one of the latencies above, over the requests that were answered.

    The client's lateness counts for all that were sent.
    """
    chosen = [one for one in run.outcomes if one.ok or what is lateness]
    values = [what(one) for one in chosen]
    return percentile([v if isinstance(v, list) else [v] for v in values if v is not None], percent)


@dataclass(frozen=True)
class Objectives:
    """What an answer has to keep to be of use, in seconds; None: anything will do."""

    ttft: float | None = None
    tpot: float | None = None
    end_to_end: float | None = None

    def met(self, one: Outcome) -> bool:
        """A failed request meets none. One without a figure (a single token has no TPOT) cannot
        have missed it."""
        if not one.ok or not one.times:
            return False
        for limit, what in ((self.ttft, ttft), (self.tpot, tpot), (self.end_to_end, end_to_end)):
            found = what(one)
            if limit is not None and found is not None and found > limit:
                return False
        return True


def seconds(run: Run) -> float:
    """From when the first request was due to when the last one ended."""
    if not run.outcomes:
        return 0.0
    return max(one.ended for one in run.outcomes) - min(one.due for one in run.outcomes)


@dataclass(frozen=True)
class Goodput:
    """Answers within the objectives.

    Avoids: counting tokens that came too late for anybody, which is how a peak of throughput is
    reached.
    """

    per_second: float
    share: float
    """of the requests that were sent, failed ones among them"""


def goodput(run: Run, objectives: Objectives) -> Goodput:
    good = sum(objectives.met(one) for one in run.outcomes)
    return Goodput(
        good / seconds(run) if good else 0.0,
        good / len(run.outcomes) if run.outcomes else 0.0,
    )


def failures(run: Run) -> dict[str, int]:
    """How many requests had no whole answer, by kind: the words before the colon."""
    kinds = [one.failure.partition(":")[0] for one in run.outcomes if not one.ok]
    found = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    return found | ({"not sent": run.not_sent} if run.not_sent else {})


@dataclass(frozen=True)
class Hits:
    """Cached tokens of the prompts that were answered, as each answer says."""

    prompt_tokens: int
    cached_tokens: int
    requests: int
    requests_with_a_hit: int
    mean_of_ratios: float
    """of cached to prompt tokens, request by request"""

    @property
    def computed_tokens(self) -> int:
        """What prefill had to do."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def share_of_tokens(self) -> float:
        """What prefill was saved: cached of all prompt tokens.

        Avoids: the mean of ratios, in which a short prompt that hits counts as much as a long one
        that does not; and the share of requests with a hit, in which one block is a hit.
        """
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def hits(outcomes: Iterable[Outcome]) -> Hits:
    """Of one run's outcomes, or of several runs' together."""
    pairs = [
        (one.prompt_tokens, one.cached_tokens)
        for one in outcomes
        if one.ok and one.prompt_tokens and one.cached_tokens is not None
    ]
    return Hits(
        prompt_tokens=sum(prompt for prompt, _ in pairs),
        cached_tokens=sum(cached for _, cached in pairs),
        requests=len(pairs),
        requests_with_a_hit=sum(cached > 0 for _, cached in pairs),
        mean_of_ratios=float(np.mean([cached / prompt for prompt, cached in pairs]))
        if pairs
        else 0.0,
    )


# What the engine counted meanwhile.


@dataclass
class Counted:
    """How an engine's counters changed."""

    changed: dict[str, float] = field(default_factory=dict)

    def by_source(self) -> dict[str, int]:
        """Prompt tokens by where their KV came from, as the engine itself counts them: vLLM's
        prompt_tokens_by_source (0.32.0), SGLang's prefill_effective_tokens (0.5.23). Else empty."""
        pattern = re.compile(
            r"(?:vllm:prompt_tokens_by_source_total\{source|"
            r'sglang:prefill_effective_tokens_total\{mode)="(\w+)"\}'
        )
        found = ((pattern.fullmatch(name), value) for name, value in self.changed.items())
        return {match[1]: int(value) for match, value in found if match}


@contextlib.contextmanager
def counting(engine: Counting) -> Iterator[Counted]:
    """What the engine's counters gain inside the `with` block, which is for nobody else's requests.

    Raises EngineError if they do not come to rest, see settled(), or if one of them is lower than
    before: the engine was started anew. (Where all have grown beyond what they were, nobody sees
    that.)
    """

    def counters() -> dict[str, float]:
        return {
            name: value
            for name, value in engine.metrics().items()
            # Looking is a request by HTTP, too; and SGLang counts its CPU's seconds all the time.
            if re.search(r"(?<!_seconds)_(?:total|sum|count)(?:\{|$)", name)
            and ":http_" not in name
        }

    counted, before = Counted(), counters()
    yield counted
    after = settled(counters)
    gains = {name: gained(name, before.get(name, 0), after.get(name, 0)) for name in after | before}
    counted.changed = {name: gain for name, gain in gains.items() if gain}


def gained(name: str, before: float, after: float) -> float:
    """How far a counter has gone. Raises EngineError if that is backwards: a counter goes back
    only where its system was started anew, and what it counted before that is lost."""
    if after < before:
        raise EngineError(
            f"{name} went back from {before:,.10g} to {after:,.10g}: its system was started anew "
            "in between, and what it counted before is lost. Measure without a restart."
        )
    return after - before


def settled(read: Callable[[], T], *, rest: float = 1.5, most: float = 30) -> T:
    """A reading of counters that has stayed the same for `rest` seconds.

    Systems store behind an answer, and count behind what they do: LMCache some tenths of a second.
    A reading that is under way is waited for. Raises EngineError if after `most` seconds none has
    been the same for so long.
    """
    begun = time.monotonic()
    now, since = read(), time.monotonic()
    slowest = since - begun
    while True:
        time.sleep(0.2)
        asked = time.monotonic()
        again = read()
        came = time.monotonic()
        slowest = max(slowest, came - asked)
        if again != now:
            now, since = again, came
        # A slow reading may be of any moment between: only what passed before it is sure.
        elif asked - since >= rest:
            return now
        if came - begun > most:
            raise EngineError(
                f"Counters did not stand still for {rest:g} s within {most:g} s: other requests "
                f"are running, or reading is slow (the slowest took {slowest:.1f} s)."
            )


# For people, and for results/.


def summary(run: Run, objectives: Objectives | None = None) -> dict[str, Any]:
    """Every figure of a run as JSON, for a result file. Times in milliseconds."""
    found: dict[str, Any] = {
        "requests": len(run.outcomes),
        "answered": sum(one.ok for one in run.outcomes),
        "failures": failures(run),
        "seconds": round(seconds(run), 3),
        "output_tokens": sum(sum(one.tokens) for one in run.outcomes),
        "latencies_ms": {},
    }
    for name, what in LATENCIES.items():
        for percent in (50, 90, 99):
            estimate = latency(run, what, percent)
            if estimate is not None:
                found["latencies_ms"].setdefault(name, {})[f"p{percent}"] = {
                    "value": round(1000 * estimate.value, 3),
                    "low": round(1000 * estimate.low, 3),
                    "high": round(1000 * estimate.high, 3),
                    "carries": estimate.carries,
                }
    cached = hits(run.outcomes)
    found["prompt_tokens"] = cached.prompt_tokens
    found["cached_tokens"] = cached.cached_tokens
    found["computed_tokens"] = cached.computed_tokens
    if objectives is not None:
        good = goodput(run, objectives)
        found["goodput"] = {
            "objectives": {k: v for k, v in vars(objectives).items() if v is not None},
            "per_second": round(good.per_second, 3),
            "share": round(good.share, 4),
        }
    return found


def record(
    name: str, what: str, engine: GeneratingServer, run: Run, objectives: Objectives | None = None
) -> None:
    """Write results/<name>.json: the figures of a run, and all that they depend on."""
    # The pins name its version, and those of all that it imports.
    conditions = engine.conditions() | {"environment": engine.pins, "workload": run.manifest}
    report.record(name, what, conditions, summary(run, objectives))


def show(run: Run, percents: Sequence[float] = (50, 90, 99)) -> None:
    """Print the latencies of a run in milliseconds: percentile [95% interval]. A question mark
    stands behind what fewer than ten requests beyond it carry."""
    from rich.console import Console
    from rich.table import Table

    failed = ", ".join(f"{kind}: {count}" for kind, count in failures(run).items())
    title = f"{len(run.outcomes)} requests in {seconds(run):.1f} s; {failed or 'none failed'}"
    table = Table(title=title, title_justify="left")
    for heading in ("ms", *(f"P{percent:g}" for percent in percents)):
        table.add_column(heading)
    for name, what in LATENCIES.items():
        estimates = [latency(run, what, percent) for percent in percents]
        table.add_row(name, *(str(estimate or "-") for estimate in estimates))
    Console().print(table)
