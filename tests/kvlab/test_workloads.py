"""Workloads are what they say: their rates, lengths and sharing, and the traces of others."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from kvlab import workloads as w
from kvlab.workloads import WorkloadError


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def gaps(times: list[float]) -> np.ndarray:
    return np.diff([0.0, *times])


@pytest.mark.parametrize("cv", [0, 0.5, 1, 3])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    found = gaps(w.Gamma(rate=5, cv=cv).times(40_000, rng()))
    assert found.mean() == pytest.approx(0.2, rel=0.06)
    assert found.std() / found.mean() == pytest.approx(cv, abs=0.1)


def test_poisson_counts_have_their_mean_as_variance() -> None:
    times = np.array(w.Poisson(10).times(20_000, rng()))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.05)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_on_and_off() -> None:
    times = w.OnOff(rate=20, on=2, off=3).times(2000, rng())
    assert times == sorted(times)
    assert all(at % 5 < 2 for at in times)
    assert len(times) / (times[-1] / 5 * 2) == pytest.approx(20, rel=0.1)


def test_lengths() -> None:
    drawn = w.LogNormal(median=50, sigma=1, most=400).draw(20_000, rng())
    assert statistics.median(drawn) == pytest.approx(50, rel=0.05)
    assert min(drawn) >= 1
    assert max(drawn) == 400
    assert set(w.Observed((3, 9)).draw(100, rng())) == {3, 9}
    assert w.Fixed(4).draw(3, rng()) == [4, 4, 4]


def shared(a: list[int], b: list[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


def test_families_share_their_beginning_and_nothing_else() -> None:
    prompts = w.Families(families=3, shared=40, own=w.Fixed(20)).draw(60, rng())
    assert {p.group for p in prompts} == {"family 0", "family 1", "family 2"}
    for a in prompts[:20]:
        for b in prompts[20:]:
            common = shared(a.tokens, b.tokens)
            assert (40 <= common < 50) if a.group == b.group else common < 10


def test_a_tree_forks_where_it_says() -> None:
    prompts = w.Tree(levels=((1, 30), (3, 20)), own=w.Fixed(10)).draw(60, rng())
    assert {p.group for p in prompts} == {"0/0", "0/1", "0/2"}
    for a in prompts[:20]:
        for b in prompts[20:]:
            assert shared(a.tokens, b.tokens) >= (50 if a.group == b.group else 30)
    assert {len(p.tokens) for p in prompts} == {60}


def test_a_turn_of_a_chat_holds_all_that_came_before() -> None:
    prompts = w.Chats(chats=2, system=16, turn=w.Fixed(10), answer=w.Fixed(5)).draw(6, rng())
    assert [p.group for p in prompts] == ["chat 0", "chat 1"] * 3
    assert [len(p.tokens) for p in prompts] == [26, 26, 41, 41, 56, 56]
    assert prompts[2].tokens[:26] == prompts[0].tokens
    assert prompts[0].tokens[:16] == prompts[1].tokens[:16]


def test_the_hot_set_switches() -> None:
    parts = w.HotSet(families=10, hot=2, share=0.9, switch=500, shared=8, own=w.Fixed(4))
    groups = [p.group for p in parts.draw(1000, rng())]
    for first, hot in ((0, {"family 0", "family 1"}), (500, {"family 2", "family 3"})):
        part = groups[first : first + 500]
        assert sum(group in hot for group in part) / 500 == pytest.approx(0.9, abs=0.05)


def test_what_an_unlimited_cache_would_reuse() -> None:
    a = list(range(10, 50))
    prompts = [a, a, [*a[:16], 1, 2, 3, 4], a[:16], [99, *a[1:]]]
    # 40 tokens: of blocks of 8 the last one is never all cached, for one token is computed.
    assert list(w.reusable(prompts, 8)) == [0, 32, 16, 8, 0]
    assert list(w.reusable(prompts, 16)) == [0, 32, 16, 0, 0]
    assert list(w.reusable([[1, 2], [1, 2]], 1)) == [0, 1]


def made(**changes: object) -> w.Workload:
    parts: dict[str, object] = {
        "arrivals": w.Poisson(2),
        "prompts": w.Families(4, 64, w.Fixed(16)),
        "outputs": w.LogNormal(20, 0.5, 64),
        "count": 50,
        "seed": 3,
    }
    return w.make(**parts | changes)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_and_a_part_that_changes_leaves_the_others() -> None:
    one, again, other = made(), made(), made(seed=4)
    assert one == again
    assert one.manifest()["sha256"] == again.manifest()["sha256"] != other.manifest()["sha256"]
    faster = made(arrivals=w.Poisson(4))
    assert [r.prompt for r in faster.requests] == [r.prompt for r in one.requests]
    assert [r.output for r in faster.requests] == [r.output for r in one.requests]
    assert [r.at for r in faster.requests] != [r.at for r in one.requests]


def test_the_manifest_says_what_was_sent() -> None:
    manifest = made().manifest(block_size=16)
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["requests"] == 50
    assert manifest["prompt_tokens"] == 50 * 80
    assert manifest["reusable_tokens"] == (50 - 4) * 64
    assert manifest["made_by"]["prompts"]["kind"] == "Families"
    assert manifest["made_by"]["prompts"]["own"] == {"kind": "Fixed", "tokens": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0},
        {"arrivals": w.Poisson(0)},
        {"arrivals": w.Gamma(1, -1)},
        {"arrivals": w.Times((0.0,))},
        {"outputs": w.Fixed(0)},
        {"outputs": w.Observed(())},
        {"prompts": w.HotSet(3, 4, 0.5, 10, 8, w.Fixed(4))},
        {"prompts": w.HotSet(3, 1, 1.5, 10, 8, w.Fixed(4))},
        {"prompts": w.Chats(0, 8, w.Fixed(4), w.Fixed(4))},
        {"prompts": w.Families(2, -1, w.Fixed(4))},
        {"arrivals": w.Gamma(1, float("nan"))},
        {"arrivals": w.OnOff(1, 1, -5)},
        {"outputs": w.Observed((-3, 0))},
        {"outputs": w.LogNormal(10, -1, 20)},
        {"outputs": w.Fixed(2.5)},  # type: ignore[arg-type]
        {"seed": -1},
    ],
)
def test_what_cannot_be_drawn_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WorkloadError):
        made(**changes)


# Traces.

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1200, "output_length": 30, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 700, "output_length": 1, "hash_ids": [0, 3]}
{"timestamp": 4500, "input_length": 1300, "output_length": 64, "hash_ids": [0, 1, 4]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
VIDUR = """\
,arrived_at,num_prefill_tokens,num_decode_tokens
0,5.5,374,44
1,6.0,396,109
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncakes_form(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    rows = w.read(path)
    assert [row.at for row in rows] == [0, 0, 3.5]
    assert rows[2] == w.TraceRequest(3.5, 1300, 64, (0, 1, 4))
    whole = w.from_trace(path)
    assert [len(r.prompt) for r in whole.requests] == [1200, 700, 1300]
    assert shared(whole.requests[0].prompt, whole.requests[2].prompt) >= 1024
    assert list(w.reusable([r.prompt for r in whole.requests], 512)) == [0, 512, 1024]
    small = w.from_trace(path, shrink=32, speed=2, limit=2)
    assert [(r.at, len(r.prompt), r.output) for r in small.requests] == [(0, 38, 1), (0, 22, 1)]
    assert small.manifest()["made_by"]["shrink"] == 32


def test_a_byte_order_mark_a_blank_line_and_another_order_are_read(tmp_path: Path) -> None:
    lines = MOONCAKE.splitlines()
    path = written(tmp_path, "\ufeff" + "\r\n".join([lines[2], "", *lines[:2], ""]))
    assert [(row.at, row.input) for row in w.read(path)] == [(0, 1200), (0, 700), (3.5, 1300)]


def test_azures_and_vidurs_form(tmp_path: Path) -> None:
    rows = w.read(written(tmp_path, AZURE))
    assert [(row.input, row.output) for row in rows] == [(4808, 10), (3180, 8)]
    assert rows[1].at == pytest.approx(0.052, abs=1e-5)
    assert w.read(written(tmp_path, VIDUR)) == [
        w.TraceRequest(0, 374, 44),
        w.TraceRequest(0.5, 396, 109),
    ]
    prompts = [r.prompt for r in w.from_trace(tmp_path / "trace").requests]
    assert list(w.reusable(prompts, 16)) == [0, 0]  # nothing is known to be shared


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither JSON lines"),
        ("a,b\n1,2\n", "neither JSON lines"),
        ('{"timestamp": 1}\n', r"trace:1: KeyError"),
        (MOONCAKE + "{broken\n", r"trace:4: JSONDecodeError"),
        (MOONCAKE.replace("[0, 3]", "[0]"), "trace:2: 700 tokens are not 1 blocks"),
        (AZURE + "yesterday,1,2\n", r"trace:4: ValueError"),
        (AZURE + "2023-11-16 18:17:05,-1,2\n", "trace:4: a moment or a length"),
        (MOONCAKE.replace("1000,", "1" + "0" * 400 + ",", 1), "trace:1: OverflowError"),
        (MOONCAKE.replace("[0, 3]", "[0, -3]"), "trace:2: a length or a hash id"),
        (AZURE.splitlines()[0], "holds no request"),
    ],
)
def test_a_damaged_trace_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        w.read(written(tmp_path, text))
    with pytest.raises(WorkloadError, match="cannot be read"):
        w.read(tmp_path / "nowhere")
