"""Figures are what their definitions say, on outcomes made by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest

from kvlab import measure
from kvlab.engines.protocol import EngineError
from kvlab.load import Outcome, Run


def outcome(index: int = 0, **fields: object) -> Outcome:
    made = {
        "group": "",
        "due": 1.0,
        "sent": 1.1,
        "ended": 2.5,
        "times": [2.0, 2.2, 2.4],
        "tokens": [1, 1, 1],
        "prompt_tokens": 100,
        "cached_tokens": 0,
    }
    return Outcome(index=index, **made | fields)  # type: ignore[arg-type]


def run(*outcomes: Outcome, planned: int | None = None) -> Run:
    return Run(list(outcomes), planned or len(outcomes), {}, 0.0)


def test_one_request() -> None:
    one = outcome()
    assert measure.lateness(one) == pytest.approx(0.1)
    assert measure.ttft(one) == pytest.approx(1.0)  # from when it was due, not sent
    assert measure.itl_by_chunk(one) == pytest.approx([0.2, 0.2])
    assert measure.tpot(one) == pytest.approx(0.2)
    assert measure.end_to_end(one) == pytest.approx(1.4)


def test_without_tokens_there_is_no_figure() -> None:
    none = outcome(times=[], tokens=[], failure="timeout")
    assert measure.ttft(none) is measure.tpot(none) is measure.end_to_end(none) is None
    assert measure.itl_by_token(none) == measure.itl_by_chunk(none) == []
    assert measure.latency(run(none), measure.ttft, 50) is None
    assert measure.summary(run(none))["answered"] == 0
    assert measure.summary(run())["requests"] == 0


def test_a_single_token_has_no_tpot_and_misses_no_objective_for_it() -> None:
    one = outcome(times=[2.0], tokens=[1])
    assert measure.tpot(one) is None
    assert measure.Objectives(tpot=0.001).met(one)


def test_goodput_counts_what_failed_as_missed() -> None:
    found = run(
        outcome(0),
        outcome(1, times=[1.2, 1.3], tokens=[1, 1]),
        outcome(2, failure="timeout", ended=3.0),
    )
    good = measure.goodput(found, measure.Objectives(ttft=0.5))
    assert good.share == pytest.approx(1 / 3)
    assert good.per_second == pytest.approx(1 / 2)  # from 1.0 to 3.0
    assert measure.goodput(found, measure.Objectives()).share == pytest.approx(2 / 3)


def test_three_denominators_of_a_hit_rate() -> None:
    found = measure.hits(
        [
            outcome(0, prompt_tokens=1000, cached_tokens=0),
            outcome(1, prompt_tokens=40, cached_tokens=32),
            outcome(2, prompt_tokens=40, cached_tokens=32),
            outcome(3, prompt_tokens=None, failure="timeout"),
        ]
    )
    assert found.share_of_tokens == pytest.approx(64 / 1080)
    assert found.mean_of_ratios == pytest.approx(1.6 / 3)
    assert (found.requests_with_a_hit, found.requests) == (2, 3)
    assert found.computed_tokens == 1016


def test_failures_by_kind() -> None:
    found = run(
        outcome(0, failure="refused: 503 full"),
        outcome(1, failure="refused: 429"),
        outcome(2, failure="timeout"),
        planned=5,
    )
    assert measure.failures(found) == {"refused": 2, "timeout": 1, "not sent": 2}


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        values = rng.exponential(1, 200)
        estimate = measure.percentile([[v] for v in values], 50, seed=trial)
        held += estimate.low <= np.log(2) <= estimate.high
    assert 180 <= held <= 199  # 95% of 200 are 190


def test_gaps_of_one_answer_are_not_independent() -> None:
    """Requests that are slow or fast as a whole: drawing gaps one by one would promise too much."""
    rng = np.random.default_rng(0)
    requests = [[speed] * 50 for speed in rng.exponential(1, 40)]
    by_request = measure.percentile(requests, 50)
    by_gap = measure.percentile([[gap] for gaps in requests for gap in gaps], 50)
    assert by_request.value == by_gap.value
    assert by_request.high - by_request.low > 3 * (by_gap.high - by_gap.low)


@pytest.mark.parametrize(
    ("count", "percent", "carries"),
    [(20, 50, True), (19, 50, False), (200, 99, False), (1000, 99, True), (100, 90, True)],
)
def test_what_a_percentile_needs(count: int, percent: float, carries: bool) -> None:
    estimate = measure.percentile([[float(i)] for i in range(count)], percent)
    assert estimate.carries is carries
    assert str(estimate).endswith("?") is not carries


class Engine:
    def __init__(self, *pages: dict[str, float]) -> None:
        self.pages = list(pages)

    def metrics(self) -> dict[str, float]:
        return self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]


def test_counters_are_read_until_they_rest() -> None:
    head = 'vllm:prompt_tokens_by_source_total{source="%s"}'
    pages = [
        {head % "local_compute": compute, head % "local_cache_hit": hit, "vllm:running": 1.0}
        for compute, hit in ((100, 0), (110, 0), (117, 384), (117, 384))
    ]
    pages[-1]["vllm:request_success_total"] = 1.0  # which moves last
    with measure.counting(Engine(*pages)) as counted:
        pass
    assert counted.by_source() == {"local_compute": 17, "local_cache_hit": 384}
    assert counted.changed["vllm:request_success_total"] == 1
    assert "vllm:running" not in counted.changed


def test_counters_that_go_back_are_those_of_another_start() -> None:
    name = "vllm:prompt_tokens_total"
    for later in ({name: 30.0}, {}):  # a counter with labels is not there before it counts
        with (
            pytest.raises(EngineError, match=rf"{name} went back from 100 to (30|0): .* anew"),
            measure.counting(Engine({name: 100.0}, later)),
        ):
            pass


class Clock:
    """A time.monotonic() that only sleeping and reading move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(measure.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(measure.time, "sleep", self.on)

    def on(self, seconds: float) -> None:
        self.now += seconds

    def reader(self, *readings: tuple[float, int]) -> Callable[[], int]:
        """Reads these, each of which takes so many seconds, and then the last one for ever."""
        left = list(readings)

        def read() -> int:
            seconds, value = left.pop(0) if len(left) > 1 else left[0]
            self.on(seconds)
            return value

        return read


def test_counters_that_never_rest_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, numbers = Clock(monkeypatch), itertools.count()
    with pytest.raises(EngineError, match=r"for 1\.5 s within 30 s"):
        measure.settled(lambda: next(numbers))
    assert 30 <= clock.now < 31


def test_a_slow_reading_is_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reading took its time, and may have looked at its beginning: right behind the
    first one. The counter moves once more."""
    clock = Clock(monkeypatch)
    assert measure.settled(clock.reader((0, 1), (5, 1), (0, 2))) == 2
    # Where every reading is slow, counters that rest are known even so.
    assert measure.settled(clock.reader((5, 1))) == 1


def test_a_reading_that_hangs_beyond_the_deadline_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(EngineError, match=r"the slowest took 40\.0 s"):
        measure.settled(clock.reader((0, 1), (40, 2)))
    assert clock.now < 41
    # One that had been asked for at rest, and came late: it is a reading.
    assert measure.settled(clock.reader(*[(0, 1)] * 8, (40, 1))) == 1


def test_the_bootstrap_is_numpys_percentile_of_what_was_drawn() -> None:
    requests = [[1.0, 5.0, 5.0], [2.0], [9.0, 0.5]]
    rng = np.random.default_rng(3)
    drawn = [rng.integers(3, size=3) for _ in range(50)]
    drawn_values = [list(itertools.chain(*(requests[i] for i in row))) for row in drawn]
    found = [np.percentile(values, 80) for values in drawn_values]
    estimate = measure.percentile(requests, 80, draws=50, seed=3)
    low, high = np.percentile(found, (2.5, 97.5))
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))


def test_sglangs_sources() -> None:
    head = 'sglang:prefill_effective_tokens_total{mode="%s"}'
    counted = measure.Counted({head % "device_hit": 384.0, head % "input": 16.0, "x_total": 1.0})
    assert counted.by_source() == {"device_hit": 384, "input": 16}


def test_a_summary_is_json_and_says_what_does_not_carry() -> None:
    found = measure.summary(
        run(*(outcome(i) for i in range(30))), measure.Objectives(ttft=2, tpot=0.5)
    )
    assert json.loads(json.dumps(found)) == found
    assert found["latencies_ms"]["TTFT"]["p50"]["value"] == pytest.approx(1000)
    assert found["latencies_ms"]["TTFT"]["p50"]["carries"]
    assert not found["latencies_ms"]["TTFT"]["p99"]["carries"]
    assert found["goodput"]["share"] == 1
    assert found["goodput"]["objectives"] == {"ttft": 2, "tpot": 0.5}
