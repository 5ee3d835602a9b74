"""A trace through caches of prefixes: by hand, as published counts say, as the engines do it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_help import need

from kvlab import replay, workloads
from kvlab.engines import sglang_tree, vllm_blocks
from kvlab.paths import ROOT
from kvlab.replay import CACHES, Replayed
from kvlab.workloads import TraceRequest, WorkloadError

TRACES = Path(os.environ.get("KVLAB_TRACES", ROOT.parent / "shared" / "data"))
HOW = "set KVLAB_TRACES to a folder with traces of kvcache-ai/Mooncake, FAST25-release/traces"


def trace(name: str) -> Path:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"no {path.name}: {HOW}")
    return path


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    def write(*requests: tuple[int, list[int]]) -> Path:
        rows = [
            {"timestamp": i, "input_length": length, "output_length": 1, "hash_ids": ids}
            for i, (length, ids) in enumerate(requests)
        ]
        path = tmp_path / "made.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_by_hand(made: Callable[..., Path]) -> None:
    path = made(
        (1300, [1, 2, 3]),  # two full blocks and one that is not
        (1300, [1, 2, 3]),  # as an object all three; an engine finds full blocks
        (1024, [1, 2]),  # an engine computes the last token, and so the whole last block
        (600, [9, 2]),  # 2 is cached, and its beginning is another one
    )
    assert replay.replay(path) == Replayed(
        requests=4,
        blocks=10,
        hits=5,
        tokens=4224,
        hit_tokens=2324,
        mean_of_ratios=0.5,
    )
    for cache in ("hash", "radix"):
        found = replay.replay(path, cache)
        assert (found.hits, found.hit_tokens) == (3, 3 * 512), cache


@pytest.mark.parametrize("cache", CACHES)
def test_what_does_not_fit_is_dropped(made: Callable[..., Path], cache: str) -> None:
    path = made((1025, [1, 2, 3]), (1025, [4, 5, 6]), (1025, [1, 2, 3]))
    assert replay.replay(path, cache).hits == (3 if cache == "object-lru" else 2)
    assert replay.replay(path, cache, blocks=3).hits == 0
    with pytest.raises(WorkloadError, match="3 blocks does not fit into 2"):
        replay.replay(path, cache, blocks=2)
    with pytest.raises(WorkloadError, match="no cache 'fifo'"):
        replay.replay(path, "fifo")


# Computed from the files by others, too: LRU at so many blocks, and the most there can be.
KNOWN = {
    "conversation": (288_500, 105_710, {1000: 0.0445, 10_000: 0.2112, 30_000: 0.3257}),
    "synthetic": (121_877, 77_953, {1000: 0.0825, 10_000: 0.4235, 30_000: 0.6242}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_published_traces(name: str) -> None:
    path = trace(name)
    blocks, most, rates = KNOWN[name]
    found = replay.replay(path)
    assert (found.blocks, found.hits) == (blocks, most)
    for size, rate in rates.items():
        found = replay.replay(path, blocks=size)
        assert round(found.hits / found.blocks, 4) == rate
    if name == "conversation":
        whole = replay.replay(path)
        assert round(whole.hit_tokens / whole.tokens, 4) == 0.3736
        assert round(whole.mean_of_ratios, 4) == 0.3843
        assert replay.replay(path, blocks=10_000).hits == 60_921


BLOCKS = 10_000


def rows_of(name: str) -> list[TraceRequest]:
    return workloads.read(trace(name))


@pytest.mark.parametrize("name", KNOWN)
def test_hash_finds_what_vllm_finds(name: str) -> None:
    rows = rows_of(name)
    need("vllm")
    mine = CACHES["hash"](BLOCKS)
    with vllm_blocks.start(BLOCKS + 1, 2) as theirs:
        for i, row in enumerate(rows):
            tokens = replay.as_tokens(row)
            theirs.add("one", tokens)
            hits = theirs.match("one") // 2
            assert theirs.allocate("one", len(tokens) - 2 * hits)
            theirs.free("one")
            assert mine(row) == hits, f"{name}, request {i}"


@pytest.mark.parametrize("core", ["python", "rust"])
def test_radix_finds_what_sglang_finds(core: sglang_tree.Core) -> None:
    rows = rows_of("conversation")
    need("sglang")
    mine = CACHES["radix"](BLOCKS)
    with sglang_tree.start(BLOCKS, core=core) as theirs:
        for i, row in enumerate(rows):
            full, last = replay.full_blocks(row)
            hits = theirs.lock("one", full[:last])
            short = len(row.blocks) - hits - theirs.sizes().free
            if short > 0:
                theirs.evict(short)
            assert theirs.publish(full) is not None
            theirs.unlock("one")
            assert mine(row) == hits, f"request {i}"
