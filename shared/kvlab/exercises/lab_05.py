"""Lab 05, measuring: what a figure says, and what it does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np

from kvlab.check import Exercise, Wrong, number

READING = 50
"""Minutes that the chapter takes to read and run."""


def _keyed(answer: Any, keys: Sequence[Any]) -> dict[Any, int | float]:
    """The answer's numbers by key, if it is a dict with just these keys."""
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"keep the keys: {', '.join(repr(key) for key in keys)}")
    return {key: number(answer[key], f"the number for {key!r}") for key in keys}


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _read(a: float, b: float) -> bool:
    """Equal in what people write down: three places behind the point."""
    return math.isclose(a, b, abs_tol=6e-4)


# 05.1 -----------------------------------------------------------------------

_DUE, _SENT, _TIMES, _TOKENS = 20.0, 20.2, (20.9, 21.3, 21.7, 22.4), (2, 3, 1, 4)
_ONE = {"lateness": 0.2, "TTFT": 0.9, "TPOT": 1.5 / 9, "end to end": 2.4}


def _check_one_request(answer: Any) -> str:
    got = _keyed(answer, tuple(_ONE))
    reasons = []
    if _read(got["TTFT"], _TIMES[0] - _SENT):
        reasons.append(
            "TTFT: that is from when the client sent it. What does its user wait for who wanted an "
            "answer at 20.0?"
        )
    elif not _read(got["TTFT"], _ONE["TTFT"]):
        reasons.append("TTFT: from when to when?")
    if _read(got["end to end"], _TIMES[-1] - _SENT):
        reasons.append("end to end: its clock starts where that of TTFT does")
    elif not _read(got["end to end"], _ONE["end to end"]):
        reasons.append("end to end: from when it was due to its last token")
    if _read(got["TPOT"], 1.5 / 10):
        reasons.append("TPOT: the first token ended the prefill. How many came after it?")
    elif _read(got["TPOT"], 1.5 / 3) or _read(got["TPOT"], 1.5 / 4):
        reasons.append("TPOT: per token, and not per chunk")
    elif _read(got["TPOT"], 2.4 / 10) or _read(got["TPOT"], 2.4 / 9):
        reasons.append("TPOT: the wait for the first token is not part of it")
    elif not _read(got["TPOT"], _ONE["TPOT"]):
        reasons.append("TPOT: the time from the first to the last token, for how many tokens?")
    if not _read(got["lateness"], _ONE["lateness"]):
        reasons.append("lateness: what did the client itself add?")
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        "0.2 s of its 0.9 are the client's own. Keep both figures: without the first, the second "
        "gets blamed on the server."
    )


# 05.2 -----------------------------------------------------------------------

_SERVICE, _EVERY, _COUNT, _STALL, _STALLED = 0.01, 0.1, 100, 3.0, 2.0
_LOOPS = ("closed, from sent", "open, from due", "closed, from due")


def _slow(loop: str, slow: float = 0.1) -> int:
    """Requests that take longer than `slow`, with the server still from _STALL to its end."""
    free, found = 0.0, 0
    for i in range(_COUNT):
        due = i * _EVERY
        # A closed loop's only user waits for the answer before the next request.
        sent = max(due, free) if loop.startswith("closed") else due
        start = max(sent, free)
        if _STALL - _SERVICE < start < _STALL + _STALLED:
            start = _STALL + _STALLED
        free = start + _SERVICE
        found += free - (sent if loop.endswith("sent") else due) > slow + 1e-9
    return found


_SLOW_ONES = {loop: _slow(loop) for loop in _LOOPS}


def _check_loops(answer: Any) -> str:
    got = _keyed(answer, _LOOPS)
    sent, due, cured = (got[loop] for loop in _LOOPS)
    right = _SLOW_ONES
    reasons = []
    if sent != right["closed, from sent"]:
        reasons.append(
            "closed, from sent: how many requests has the only user sent who waits while the "
            "server stands still?"
            if sent > 1
            else "closed, from sent: somebody was waiting when the server stood still"
        )
    if due == _STALLED / _EVERY:
        reasons.append(
            "open: all that are due during the stall are slow, true. When it ends they have piled "
            "up, and are served one after another: what of those that come next?"
        )
    elif due == 1:
        reasons.append("open: requests leave when they are due, whatever the server does")
    elif due != right["open, from due"]:
        reasons.append(
            "open: each one that comes during the stall waits for its end and for those before it; "
            "write down the first and the last of them, and the ones after"
        )
    if cured == right["closed, from sent"]:
        reasons.append(
            "closed, from due: the one due at 3.1 is sent at 5.01. How long did its user wait who "
            "wanted to ask at 3.1?"
        )
    elif cured != right["closed, from due"]:
        reasons.append(
            "closed, from due: who is due during the stall is sent after it, one after another. "
            "How does that differ from a queue in the server?"
        )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        f"The same server, the same two seconds: {right['closed, from sent']} slow request of "
        f"{_COUNT} by the clock of a closed loop, {right['open, from due']} by that of the users. "
        "Half of the cure is the clock: from when a request was due."
    )


# 05.3 -----------------------------------------------------------------------

Gaps = Callable[[list[float], list[int]], list[float]]


def _by_token(times: list[float], tokens: list[int]) -> list[float]:
    gaps = [0.0] * (tokens[0] - 1)
    for before, after, count in zip(times, times[1:], tokens[1:], strict=False):
        gaps += [(after - before) / count] * count
    return gaps


def _streams() -> list[tuple[list[float], list[int]]]:
    rng = random.Random(5)
    made = []
    for _ in range(60):
        count = rng.randrange(1, 8)
        times = sorted(rng.uniform(0, 5) for _ in range(count))
        made.append((times, [rng.randrange(1, 5) for _ in range(count)]))
    return [([1.0], [1]), ([1.0, 1.5], [1, 1]), ([1.0, 1.5, 3.0], [1, 2, 3]), *made, ([1.0], [3])]


def _check_gaps(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function itl_by_token and pass the function itself")
    for times, tokens in _streams():
        given = answer(list(times), list(tokens))
        if given is None:
            raise Wrong("it gives None: is a `return` missing?")
        try:
            got = [number(value, "a gap") for value in islice(given, 1000)]
        except TypeError:
            raise Wrong("it should give a list of numbers") from None
        what = f"for chunks at {[round(t, 2) for t in times]} with {tokens} tokens"
        total = sum(tokens)
        if len(times) > 1 and len(got) == len(times) - 1 != total - 1:
            raise Wrong(f"{what} it gives one gap for each chunk: a chunk may hold several tokens")
        if len(got) == total:
            raise Wrong(f"{what} it gives {total} gaps: between {total} tokens there are fewer")
        if len(got) != total - 1:
            raise Wrong(
                f"{what} it gives {len(got)} gaps for {total} tokens. Do not forget those that "
                "came together with the first"
            )
        if not math.isclose(sum(got), times[-1] - times[0], abs_tol=1e-5):
            raise Wrong(
                f"{what} the gaps do not add up to the time from the first chunk to the last"
            )
        right = _by_token(times, tokens)
        if not all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(got, right, strict=True)):
            raise Wrong(f"{what} the gap before a chunk is shared evenly by the tokens in it")
    return (
        "The mean over a request is its TPOT, whatever the chunks. For what a user sees, keep the "
        "gaps between chunks too: sharing a pause among four tokens makes it look short."
    )


def _per_chunk(times: list[float], tokens: list[int]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _without_the_first(times: list[float], tokens: list[int]) -> list[float]:
    return _by_token(times, [1, *tokens[1:]])


def _burst(times: list[float], tokens: list[int]) -> list[float]:
    gaps = [0.0] * (tokens[0] - 1)
    for before, after, count in zip(times, times[1:], tokens[1:], strict=False):
        gaps += [after - before] + [0.0] * (count - 1)
    return gaps


def _by_the_chunk_before(times: list[float], tokens: list[int]) -> list[float]:
    gaps = [0.0] * (tokens[-1] - 1)
    for before, after, count in zip(times, times[1:], tokens[:-1], strict=False):
        gaps += [(after - before) / count] * count
    return gaps


def _mean_of_all(times: list[float], tokens: list[int]) -> list[float]:
    total = sum(tokens) - 1
    return [(times[-1] - times[0]) / total] * total if total else []


# 05.4 -----------------------------------------------------------------------

_BEYOND = 10
_NEEDED = {50: 20, 90: 100, 99: 1000, 99.9: 10_000}


def _check_needed(answer: Any) -> str:
    got = _keyed(answer, tuple(_NEEDED))
    if all(_near(got[p], _NEEDED[p]) for p in _NEEDED):
        return (
            "A P99 with fewer than a thousand requests behind it is hearsay: of two hundred, two "
            "lie beyond it."
        )
    if all(_near(got[p], _NEEDED[p] / _BEYOND) for p in _NEEDED):
        raise Wrong("that leaves one request beyond each percentile: ten are asked for")
    if got[50] == 10:
        raise Wrong("50: of ten requests, how many lie above the median?")
    if got[99.9] == 1000 and got[99] == 1000:
        raise Wrong("99.9: one of a thousand lies beyond it")
    bad = next(p for p in _NEEDED if not _near(got[p], _NEEDED[p]))
    raise Wrong(f"{bad}: which share of the requests lies beyond it? Ten have to")


# 05.5 -----------------------------------------------------------------------

_TABLE = ((2400, 0), (160, 128), (160, 128), (160, 128), (96, 0), (2400, 1984))
_RATES = {
    "of tokens": sum(c for _, c in _TABLE) / sum(p for p, _ in _TABLE),
    "mean of ratios": sum(c / p for p, c in _TABLE) / len(_TABLE),
    "requests with a hit": sum(c > 0 for _, c in _TABLE) / len(_TABLE),
    "saved by a perfect cache": 0.0,
}
# A prompt's last token is always computed, and whole blocks of 32 count.
_BEST = sum((p - 1) // 32 * 32 for p, _ in _TABLE)
_RATES["saved by a perfect cache"] = _BEST / sum(p for p, _ in _TABLE)


def _check_rates(answer: Any) -> str:
    got = _keyed(answer, tuple(_RATES))
    wrong = [name for name in _RATES if not math.isclose(got[name], _RATES[name], abs_tol=5.1e-3)]
    if not wrong:
        return (
            "44%, 54% and 67%, from one run. Only the first says how much prefill was saved: "
            "whoever prints a hit rate without its denominator may have meant any of them."
        )
    if all(math.isclose(got[n], 100 * _RATES[n], abs_tol=0.6) for n in _RATES):
        raise Wrong("as shares between 0 and 1, not in percent")
    if math.isclose(got["of tokens"], _RATES["mean of ratios"], abs_tol=5.1e-3):
        raise Wrong("of tokens: a short prompt counts less here than a long one")
    if "saved by a perfect cache" in wrong:
        if math.isclose(got["saved by a perfect cache"], 1, abs_tol=1e-6):
            raise Wrong(
                "a perfect cache: also of a prompt that is all there, the last token is computed, "
                "and a cache holds whole blocks"
            )
        if len(wrong) == 1:
            raise Wrong("a perfect cache: for each prompt, whole blocks of 32 in all but one token")
    raise Wrong(f"{wrong[0]}: what is divided by what?")


# 05.6 -----------------------------------------------------------------------

Outcomes = list[dict[str, Any]]
Good = Callable[[Outcomes, float, float], float]


def _good(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    """Answers within both objectives, a second."""
    good = 0
    for one in outcomes:
        if one["failed"] or one["ttft"] > ttft:
            continue
        good += one["tpot"] is None or one["tpot"] <= tpot
    begin = min(one["due"] for one in outcomes)
    return good / (max(one["ended"] for one in outcomes) - begin)


def _runs() -> list[tuple[Outcomes, float, float]]:
    rng = random.Random(6)
    runs = []
    for _ in range(40):
        outcomes: Outcomes = []
        for i in range(rng.randrange(3, 30)):
            failed = rng.random() < 0.2
            due = 2 + i * 0.3
            outcomes.append(
                {
                    "due": due,
                    "ended": due + rng.uniform(0.5, 9),
                    "failed": failed,
                    # What failed may have had a first token in time.
                    "ttft": rng.choice([0.1, 0.5, 0.9, 1.0, 1.1, 3.0]),
                    "tpot": rng.choice([None, 0.01, 0.05, 0.06, 0.5]),
                }
            )
        rng.shuffle(outcomes)  # in the order in which they ended, say
        runs.append((outcomes, rng.choice([0.5, 1.0]), rng.choice([0.05, 0.06])))
    return runs


def _check_good(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function goodput and pass the function itself")
    for outcomes, ttft, tpot in _runs():
        given = answer([dict(one) for one in outcomes], ttft, tpot)
        got = number(given, "the goodput")
        right = _good(outcomes, ttft, tpot)
        if _near(got, right):
            continue
        for name, flaw in _FLAWS_OF_GOODPUT.items():
            if _near(got, flaw(outcomes, ttft, tpot)):
                raise Wrong(_SAID_OF_GOODPUT[name])
        raise Wrong(
            f"for {len(outcomes)} requests it gives {got:.3f} a second. Count the good ones, then "
            "divide by the seconds from the first request that was due to the last that ended"
        )
    return (
        "Throughput counts every token that leaves the machine, also those nobody waited for. "
        "Goodput counts answers that were of use, and what failed was not."
    )


def _failed_count(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    return _good([one | {"failed": False} for one in outcomes], ttft, tpot)


def _either(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    good = sum(
        not one["failed"] and (one["ttft"] <= ttft or (one["tpot"] or 0) <= tpot)
        for one in outcomes
    )
    return good / (max(o["ended"] for o in outcomes) - min(o["due"] for o in outcomes))


def _single_tokens_miss(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    return _good(
        [one | {"tpot": math.inf if one["tpot"] is None else one["tpot"]} for one in outcomes],
        ttft,
        tpot,
    )


def _as_share(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    span = max(o["ended"] for o in outcomes) - min(o["due"] for o in outcomes)
    return _good(outcomes, ttft, tpot) * span / len(outcomes)


def _until_the_last_was_due(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    span = max(o["ended"] for o in outcomes) - min(o["due"] for o in outcomes)
    due = [o["due"] for o in outcomes]
    return _good(outcomes, ttft, tpot) * span / (max(due) - min(due))


def _from_zero(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    span = max(o["ended"] for o in outcomes) - min(o["due"] for o in outcomes)
    return _good(outcomes, ttft, tpot) * span / max(o["ended"] for o in outcomes)


def _strictly(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    return _good(outcomes, ttft - 1e-9, tpot - 1e-9)


def _fixed_limits(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    return _good(outcomes, 1.0, 0.05)


def _from_the_first_in_the_list(outcomes: Outcomes, ttft: float, tpot: float) -> float:
    span = max(o["ended"] for o in outcomes) - min(o["due"] for o in outcomes)
    first = outcomes[0]["due"]
    return _good(outcomes, ttft, tpot) * span / (max(o["ended"] for o in outcomes) - first)


_FLAWS_OF_GOODPUT: dict[str, Good] = {
    "limits": _fixed_limits,
    "list": _from_the_first_in_the_list,
    "failed": _failed_count,
    "either": _either,
    "single": _single_tokens_miss,
    "share": _as_share,
    "due": _until_the_last_was_due,
    "zero": _from_zero,
    "strict": _strictly,
}
_SAID_OF_GOODPUT = {
    "limits": "the objectives are the arguments `ttft` and `tpot`, and differ from run to run",
    "list": "the first in the list need not be the first that was due",
    "failed": "it counts answers that broke off: a request that failed meets no objective",
    "either": "an answer has to meet both objectives, and not one of them",
    "single": "an answer of one token has no TPOT (None), and cannot have missed it",
    "share": "that is a share of the requests; goodput is a rate, answers a second",
    "due": "the run is not over when the last request is due: when does the last one end?",
    "zero": "the clock of the run starts when its first request is due",
    "strict": "an answer that takes exactly as long as it may has kept the objective",
}


# 05.7 -----------------------------------------------------------------------

_AA_KEYS = ("first", "same seed", "same seed, after a reset", "another seed")
_AA_PROMPTS, _AA_LENGTH, _AA_BLOCK = 16, 300, 32
_AA_HIT = _AA_PROMPTS * ((_AA_LENGTH - 1) // _AA_BLOCK * _AA_BLOCK)


def _check_a_against_a(answer: Any) -> str:
    got = _keyed(answer, _AA_KEYS)
    right = dict(zip(_AA_KEYS, (0, _AA_HIT, 0, 0), strict=True))
    if got == right:
        return (
            f"{_AA_HIT:,} of {_AA_PROMPTS * _AA_LENGTH:,} prompt tokens for nothing: the second "
            "run of A beat the first by 96%. Had it been called B, it would have been a result."
        )
    if got["same seed"] == 0:
        raise Wrong("same seed: run it on the engine that has just seen these prompts")
    if got["same seed"] == _AA_PROMPTS * _AA_LENGTH:
        raise Wrong("same seed: ask the engine (`cached_tokens`), it never reuses a whole prompt")
    if got["first"] != 0:
        raise Wrong("first: on an engine that was just started, or reset")
    if got["same seed, after a reset"] != 0:
        raise Wrong("same seed, after a reset: llm.reset_prefix_cache() first")
    if got["another seed"] != 0:
        raise Wrong("another seed: draw the prompts anew, with another seed than before")
    raise Wrong("same seed: the sum of `cached_tokens` over all outputs of that run")


# 05.8 -----------------------------------------------------------------------

Interval = Callable[[list[list[float]], float, Any], tuple[float, float]]


def _interval(
    by_request: list[list[float]], percent: float, rng: Any, draws: int = 300, inside: float = 95
) -> tuple[float, float]:
    drawn = []
    for _ in range(draws):
        chosen = rng.integers(len(by_request), size=len(by_request))
        drawn.append(np.percentile(np.concatenate([by_request[i] for i in chosen]), percent))
    low, high = np.percentile(drawn, (50 - inside / 2, 50 + inside / 2))
    return float(low), float(high)


def _slow_and_fast() -> list[list[float]]:
    """40 answers of 50 gaps each: each answer is slow or fast as a whole."""
    rng = np.random.default_rng(8)
    return [(speed * rng.uniform(0.95, 1.05, 50)).tolist() for speed in rng.exponential(1, 40)]


def _check_interval(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function interval and pass the function itself")
    message = _judge_interval(answer, _slow_and_fast(), 50)
    # Slow answers that are long as well, and a percentile that is not the middle.
    rng = np.random.default_rng(9)
    uneven = [
        (speed * rng.uniform(0.95, 1.05, 1 + int(40 * speed))).tolist()
        for speed in rng.exponential(1, 60)
    ]
    _judge_interval(answer, uneven, 80)
    _judge_level(answer)
    _judge_ends(answer)
    return message


def _judge_level(answer: Any) -> None:
    """95%, and not 90 or 99: one interval scatters too much to tell, the mean of five does not."""
    rng = np.random.default_rng(10)
    requests = [(speed * rng.uniform(0.8, 1.2, 4)).tolist() for speed in rng.exponential(1, 150)]
    low, high = _interval(requests, 50, np.random.default_rng(1), draws=1000)
    found = [answer([list(one) for one in requests], 50, rng) for _ in range(5)]
    share = float(np.mean([high for _, high in found]) - np.mean([low for low, _ in found])) / (
        high - low
    )
    if not 0.9 < share < 1.12:
        raise Wrong(
            f"over five redrawn runs it is {share:.2f} times as wide as the 95% interval: 2.5% of "
            "the percentiles lie on each side of it; and 200 draws at least are wanted"
        )


def _judge_ends(answer: Any) -> None:
    """Each request can be drawn. One of twenty holds most of the gaps: two in three draws have it,
    and its gaps are their median then."""
    fast = [[1.0 + i / 1000] for i in range(19)]
    for at, which in ((19, "last"), (0, "first")):
        requests = [*fast[:at], [9.0] * 40, *fast[at:]]
        _, high = answer([list(one) for one in requests], 50, np.random.default_rng(11))
        if number(high, "the high end") < 9:
            raise Wrong(
                f"where the {which} of twenty requests holds the slow gaps, the interval ends at "
                f"{high:.2f}, as if that request could not be drawn. Which places can a draw give?"
            )


def _judge_interval(answer: Any, requests: list[list[float]], percent: float) -> str:
    pair = answer([list(one) for one in requests], percent, np.random.default_rng(1))
    if pair is None:
        raise Wrong("it gives None: is a `return` missing?")
    if not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
        raise Wrong("it should give two numbers: the low and the high end")
    low, high = number(pair[0], "the low end"), number(pair[1], "the high end")
    if not low < high:
        raise Wrong("the low end comes first, and below the high one")
    right_low, right_high = _interval(requests, percent, np.random.default_rng(1), draws=2000)
    width, wanted = high - low, right_high - right_low
    every = np.concatenate(requests)
    if not low < float(np.percentile(every, percent)) < high:
        raise Wrong(
            f"the P{percent} of all gaps does not lie in it: which percentile did you take?"
        )
    if width < wanted / 2.5:
        raise Wrong(
            "it is much too narrow: as if the 2,000 gaps were independent. The gaps of one answer "
            "are not: what has to be drawn?"
        )
    if width > wanted * 2:
        raise Wrong(
            "it is much too wide: that is about the spread of the values, or the whole range of "
            "the draws. 95% of the draws' percentiles are wanted"
        )
    if not (abs(low - right_low) < wanted / 4 and abs(high - right_high) < wanted / 4):
        raise Wrong(
            f"[{low:.2f}, {high:.2f}] is not yet right for P{percent}: the percentile of all gaps "
            "of the requests that were drawn, some hundred times; 2.5% of these percentiles lie "
            "below the low end and 2.5% above the high one"
        )
    return (
        "Draw what is independent. For the gaps of a stream those are the requests, and for "
        "requests of one user perhaps not even these."
    )


def _draw_gaps(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    return _interval([[v] for one in by_request for v in one], percent, rng)


def _spread(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    low, high = np.percentile(np.concatenate(by_request), (2.5, 97.5))
    return float(low), float(high)


def _means(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    drawn = [
        np.mean(np.concatenate([by_request[i] for i in rng.integers(len(by_request), size=40)]))
        for _ in range(300)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def _always_the_median(
    by_request: list[list[float]], percent: float, rng: Any
) -> tuple[float, float]:
    return _interval(by_request, 50, rng)


def _of_medians(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    return _interval([[float(np.median(one))] for one in by_request], percent, rng)


def _range_of_the_draws(
    by_request: list[list[float]], percent: float, rng: Any
) -> tuple[float, float]:
    count = len(by_request)
    drawn = [
        np.percentile(
            np.concatenate([by_request[i] for i in rng.integers(count, size=count)]), percent
        )
        for _ in range(400)
    ]
    return float(min(drawn)), float(max(drawn))


def _of_90_percent(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    return _interval(by_request, percent, rng, inside=90)


def _of_99_percent(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    return _interval(by_request, percent, rng, inside=99)


def _swapped(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
    return _interval(by_request, percent, rng)[::-1]


def _never(place: int) -> Interval:
    """A bootstrap that never draws one of the requests: -1, the last, or 0, the first."""

    def interval(by_request: list[list[float]], percent: float, rng: Any) -> tuple[float, float]:
        low, high = (1, len(by_request)) if place == 0 else (0, len(by_request) - 1)
        drawn = []
        for _ in range(300):
            chosen = rng.integers(low, high, size=len(by_request))
            drawn.append(np.percentile(np.concatenate([by_request[i] for i in chosen]), percent))
        low_end, high_end = np.percentile(drawn, (2.5, 97.5))
        return float(low_end), float(high_end)

    return interval


def _without_replacement(
    by_request: list[list[float]], percent: float, rng: Any
) -> tuple[float, float]:
    drawn = [
        np.percentile(np.concatenate([by_request[i] for i in rng.permutation(len(by_request))]), 50)
        for _ in range(100)
    ]
    return float(min(drawn)), float(max(drawn))


# 05.9 -----------------------------------------------------------------------

_CLAIMS = {
    "apart": "none",
    "seed": "none",
    "tail": "median",
    "tree": "workload",
    "peak": "capacity",
}
_WHY_NOT = {
    "apart": "E had twice the hardware of D. What is left of its gain on equal hardware?",
    "seed": "what had the server seen before?",
    "tail": "how many of 200 requests lie beyond the P99? And beyond the median?",
    "tree": "one family of workloads, one length that is shared: does it carry over to others?",
    "peak": "which limit on latency did the batch of 512 keep?",
}


def _check_claims(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != set(_CLAIMS):
        raise Wrong(f"keep the keys: {', '.join(map(repr, _CLAIMS))}")
    letters = {"none", "median", "workload", "capacity", "as made"}
    for name, claim in answer.items():
        if not isinstance(claim, str) or claim not in letters:
            raise Wrong(f"{name}: one of {', '.join(sorted(letters))}")
    wrong = [name for name in _CLAIMS if answer[name] != _CLAIMS[name]]
    if wrong:
        more = f" ({len(wrong)} of five are not right yet.)" if len(wrong) > 1 else ""
        raise Wrong(f"{wrong[0]}: {_WHY_NOT[wrong[0]]}{more}")
    return (
        "An experiment allows the claim about the one thing that it let vary, under the conditions "
        "that it held, and no other."
    )


# 05.10 ----------------------------------------------------------------------

_MISTAKES = {2, 5, 7, 9}


def _check_report(answer: Any) -> str:
    if isinstance(answer, Mapping):
        raise Wrong("the numbers of the sentences, in a set or a list: {1, 2}")
    try:
        given = [number(value, "a sentence's number") for value in answer]
    except TypeError:
        raise Wrong("the numbers of the sentences, in a set or a list: {1, 2}") from None
    got = set(given)
    if not got <= set(range(1, 11)):
        raise Wrong("the sentences are numbered from 1 to 10")
    if len(got) != len(_MISTAKES):
        raise Wrong(f"four sentences are wrong, and you name {len(got)}")
    found = len(got & _MISTAKES)
    if found < len(_MISTAKES):
        raise Wrong(
            f"{found} of the four are among them. Ask of each sentence: which clock, which "
            "denominator, how many requests, and what else was different?"
        )
    return (
        "2: a closed loop has no rate that it was asked for. 5: the P99 of 150 hangs on two. 7: "
        "only the first cell began cold. 9: failed requests were left out: the "
        "slowest of all."
    )


EXERCISES = (
    Exercise(
        id="05.1",
        title="Four figures of one request",
        minutes=6,
        difficulty=1,
        kind="predict",
        roles=("backend", "kernel", "storage", "platform", "solutions"),
        check=_check_one_request,
        hints=(
            "Four moments matter: due, sent, first token, last token.",
            "TTFT and end to end start at the same moment, and it is not when the client got round "
            "to sending.",
            "TPOT: from the first token to the last one. Ten tokens: how many gaps?",
        ),
        wrong=(
            (_ONE | {"TTFT": 0.7, "end to end": 2.2}, "TTFT"),
            (_ONE | {"TPOT": 0.15}, "How many came after"),
            (_ONE | {"TPOT": 0.5}, "per chunk"),
            (_ONE | {"TPOT": 0.24}, "first token"),
            (_ONE | {"TPOT": 1.5}, "how many tokens"),
            (_ONE | {"lateness": 0}, "lateness"),
            (_ONE | {"end to end": 2.2}, "end to end"),
            ({"TTFT": 0.9}, "keep the keys"),
        ),
        right=({"lateness": 0.2, "TTFT": 0.9, "TPOT": 0.167, "end to end": 2.4},),
    ),
    Exercise(
        id="05.2",
        title="Two seconds of silence",
        minutes=10,
        difficulty=2,
        kind="predict",
        roles=("backend", "platform", "solutions"),
        check=_check_loops,
        hints=(
            "Closed, from sent: while the server stands still, how many has the user sent?",
            "Open: one is due every 0.1 s, whatever happens. The first that is hit is due at 3.0. "
            "At 5.0 all of those are served, 10 ms each.",
            "Open, the end: how long does the one wait that is due at 4.9? And one that is due at "
            "5.0, with twenty before it? And the next?",
        ),
        wrong=(
            (dict(zip(_LOOPS, (1, 1, 1), strict=True)), "whatever the server does"),
            (dict(zip(_LOOPS, (20, 22, 22), strict=True)), "only user"),
            (dict(zip(_LOOPS, (1, 20, 22), strict=True)), "piled"),
            (dict(zip(_LOOPS, (0, 22, 22), strict=True)), "somebody was waiting"),
            (dict(zip(_LOOPS, (1, 100, 22), strict=True)), "first and the last"),
            (dict(zip(_LOOPS, (1, 22, 1), strict=True)), "wanted to ask"),
            (dict(zip(_LOOPS, (1, 22, 20), strict=True)), "queue in the server"),
            ({"closed": 1}, "keep the keys"),
        ),
    ),
    Exercise(
        id="05.3",
        title="Gaps between tokens, from chunks",
        minutes=12,
        difficulty=2,
        kind="build",
        roles=("backend", "kernel", "platform"),
        check=_check_gaps,
        hints=(
            "Seven tokens have six gaps, however they were packed.",
            "The first chunk's further tokens came with its first token: what is the gap between "
            "two things that come together?",
            "Each later chunk: the time since the chunk before, divided by its tokens, once for "
            "each of them.",
        ),
        wrong=(
            (_per_chunk, "one gap for each chunk"),
            (_without_the_first, "together with the first"),
            (_burst, "shared evenly"),
            (_by_the_chunk_before, "shared evenly"),
            (_mean_of_all, "shared evenly"),
            (lambda times, tokens: None, "return"),
            (lambda times, tokens: [times[0], *_by_token(times, tokens)], "there are fewer"),
        ),
    ),
    Exercise(
        id="05.4",
        title="How many requests a percentile needs",
        minutes=5,
        difficulty=1,
        kind="predict",
        roles=("backend", "platform", "solutions"),
        check=_check_needed,
        hints=(
            "Beyond the P90 lies one request of ten.",
            "How many requests are needed so that ten of them are that tenth?",
        ),
        wrong=(
            ({50: 2, 90: 10, 99: 100, 99.9: 1000}, "one request beyond"),
            ({50: 10, 90: 100, 99: 1000, 99.9: 10_000}, "above the median"),
            ({50: 20, 90: 100, 99: 1000, 99.9: 1000}, "one of a thousand"),
            ({50: 20, 90: 90, 99: 1000, 99.9: 10_000}, "90"),
            ({50: 20}, "keep the keys"),
        ),
    ),
    Exercise(
        id="05.5",
        title="One run, three hit rates",
        minutes=10,
        difficulty=1,
        kind="predict",
        roles=("backend", "storage", "platform", "solutions"),
        check=_check_rates,
        hints=(
            "Of tokens: all cached ones, divided by all prompt tokens.",
            "Mean of ratios: a ratio for each request first, then their mean.",
            "A perfect cache has seen every prompt before. It still gives whole blocks only, and "
            "the last token of a prompt is always computed.",
        ),
        wrong=(
            (
                {n: _RATES["mean of ratios"] if n == "of tokens" else v for n, v in _RATES.items()},
                "counts less",
            ),
            ({n: 100 * v for n, v in _RATES.items()}, "not in percent"),
            (_RATES | {"saved by a perfect cache": 1.0}, "last token"),
            (_RATES | {"saved by a perfect cache": _RATES["of tokens"]}, "whole blocks of 32"),
            (_RATES | {"requests with a hit": 1 / 3}, "requests with a hit"),
            ({"of tokens": 0.4}, "keep the keys"),
        ),
        right=({n: round(v, 2) for n, v in _RATES.items()},),
    ),
    Exercise(
        id="05.6",
        title="Goodput",
        minutes=15,
        difficulty=2,
        kind="build",
        roles=("backend", "platform", "solutions"),
        check=_check_good,
        hints=(
            "Go through the outcomes and count those that did not fail and kept both limits.",
            "One token has no TPOT; exactly at the limit is within it.",
            "A rate: divided by the seconds from the first `due` to the last `ended`, failed ones "
            "included.",
        ),
        wrong=tuple((flaw, _SAID_OF_GOODPUT[name][:30]) for name, flaw in _FLAWS_OF_GOODPUT.items())
        + ((lambda outcomes, ttft, tpot: None, "return"),),
    ),
    Exercise(
        id="05.7",
        title="A against A",
        minutes=12,
        difficulty=2,
        kind="measure",
        roles=("backend", "storage", "platform", "solutions"),
        check=_check_a_against_a,
        hints=(
            "Each output of llm.generate has `cached_tokens`.",
            "Same engine, same prompts, a second time; then llm.reset_prefix_cache() and a third "
            "time; then prompts from another seed.",
        ),
        wrong=(
            (dict(zip(_AA_KEYS, (0, 0, 0, 0), strict=True)), "just seen"),
            (
                dict(zip(_AA_KEYS, (0, _AA_PROMPTS * _AA_LENGTH, 0, 0), strict=True)),
                "never reuses",
            ),
            (dict(zip(_AA_KEYS, (_AA_HIT, _AA_HIT, 0, 0), strict=True)), "just started"),
            (dict(zip(_AA_KEYS, (0, _AA_HIT, _AA_HIT, 0), strict=True)), "reset_prefix_cache"),
            (dict(zip(_AA_KEYS, (0, _AA_HIT, 0, _AA_HIT), strict=True)), "another seed"),
            (dict(zip(_AA_KEYS, (0, _AA_HIT // 16, 0, 0), strict=True)), "sum"),
        ),
    ),
    Exercise(
        id="05.8",
        title="An interval that does not promise too much",
        minutes=15,
        difficulty=3,
        kind="build",
        roles=("kernel", "platform"),
        check=_check_interval,
        hints=(
            "Bootstrap: draw as many things as there are, with replacement; take the percentile of "
            "all their values; do it some hundred times; the middle 95% of what you got is the "
            "interval.",
            "The things to draw: a slow answer has fifty slow gaps.",
            "rng.integers(n, size=n) draws n numbers below n, with replacement.",
        ),
        wrong=(
            (_draw_gaps, "too narrow"),
            (_spread, "too wide"),
            (_means, "of all gaps"),
            (_always_the_median, "P80"),
            (_of_medians, "P80"),
            (_range_of_the_draws, "too wide|not yet right"),
            (_of_90_percent, "each side"),
            (_of_99_percent, "each side|much too wide|not yet right"),
            (_never(-1), "the last of twenty requests"),
            (_never(0), "the first of twenty requests"),
            (_swapped, "comes first"),
            (_without_replacement, "below the high one"),
            (lambda by_request, percent, rng: None, "return"),
            (lambda by_request, percent, rng: 1.0, "two numbers"),
        ),
        after=("05.4",),
    ),
    Exercise(
        id="05.9",
        title="Which claim is allowed",
        minutes=12,
        difficulty=3,
        kind="explain",
        roles=("backend", "kernel", "storage", "platform", "solutions"),
        check=_check_claims,
        hints=(
            "Ask of each: what was different besides the thing that is named?",
            "Where something else differed as well (hardware, what a cache held), none is left.",
            "Three of them allow a smaller claim than the one that is made.",
        ),
        wrong=(
            (dict.fromkeys(_CLAIMS, "as made"), "apart"),
            (dict.fromkeys(_CLAIMS, "none"), "tail"),
            (_CLAIMS | {"tail": "none"}, "beyond the median"),
            (_CLAIMS | {"tree": "as made"}, "carry over"),
            (_CLAIMS | {"peak": "as made"}, "which limit"),
            (_CLAIMS | {"seed": "workload"}, "seen before"),
            (_CLAIMS | {"apart": "fast"}, "one of"),
        ),
    ),
    Exercise(
        id="05.10",
        title="A report with four mistakes",
        minutes=15,
        difficulty=3,
        kind="explain",
        roles=("backend", "platform", "solutions"),
        check=_check_report,
        hints=(
            "Which sentences name a figure? Ask of each: which clock, which denominator, how many "
            "requests?",
            "Who decides how many requests come in a second?",
            "For each run: what does the server already hold when it begins?",
            "Which requests stand behind each figure, and which do not?",
        ),
        wrong=(
            ({1, 2, 3, 4}, "1 of the four"),
            ({2, 5, 7}, "you name 3"),
            ({2, 5, 7, 8}, "3 of the four"),
            ({2, 5, 9, 10}, "3 of the four"),
            ([2, 5, 7, 11], "from 1 to 10"),
            ({2: "closed loop"}, "in a set or a list"),
        ),
        right=([9, 7, 5, 2], (2, 5, 7, 9)),
        after=("05.4",),
    ),
)
