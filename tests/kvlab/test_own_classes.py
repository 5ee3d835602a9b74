"""The engines' own cache classes, asked without a server."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from engine_help import need

from kvlab.engines import sglang_tree, vllm_blocks
from kvlab.engines.protocol import EngineError
from kvlab.engines.sglang_tree import SGLangTree, Sizes
from kvlab.engines.vllm_blocks import VLLMBlocks
from kvlab.engines.worker import Refused
from minikv.blocks import NONE_HASH, extend_hashes

need("vllm", "sglang")


@pytest.fixture(scope="module")
def manager() -> Iterator[VLLMBlocks]:
    with vllm_blocks.start(11, 4) as running:
        yield running


def test_vllm_hits_whole_blocks_but_the_last_token(manager: VLLMBlocks) -> None:
    manager.make(11, 4)
    prefix = list(range(100, 112))
    manager.add("a", [*prefix, 1, 2])
    assert manager.allocate("a", 14)
    assert manager.table("a") == [1, 2, 3, 4]
    manager.add("b", prefix)
    assert manager.match("b") == 8  # all 12 are cached, and one token has to be computed
    manager.add("salted", prefix, salt="tenant")
    assert manager.match("salted") == 0
    assert manager.allocate("b", 4)
    assert manager.table("b")[:2] == [1, 2]
    assert manager.usage() == pytest.approx(5 / 10)
    assert not manager.reset()
    manager.free("a")
    # The block without a hash is the next to be used; 3 went to the end, 1 and 2 are b's.
    assert manager.free_queue() == [4, 6, 7, 8, 9, 10, 3]
    manager.free("b")
    assert manager.reset()


def test_vllm_events_carry_the_hashes_that_minikv_computes(manager: VLLMBlocks) -> None:
    manager.make(11, 4)
    tokens = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4)
    manager.add("a", tokens)
    manager.allocate("a", 9)
    assert manager.events() == [{"stored": hashes, "parent": None, "tokens": tokens[:8]}]
    for token in (16, 17, 18):
        manager.append("a", token)
        assert manager.allocate("a", 1)
    extend_hashes(hashes, [*tokens, 16, 17, 18], 4)
    assert manager.events() == [
        {"stored": hashes[2:], "parent": hashes[1], "tokens": [15, 16, 17, 18]}
    ]
    assert NONE_HASH not in hashes
    manager.free("a")
    assert manager.reset()
    assert manager.events()[-1] == {"cleared": True}


def test_vllm_refuses_what_does_not_fit(manager: VLLMBlocks) -> None:
    manager.make(4, 4)
    manager.add("a", list(range(20)))
    assert not manager.allocate("a", 8, must_fit=True)
    assert manager.allocate("a", 8)
    assert not manager.allocate("a", 12)
    assert len(manager.table("a")) == 2
    with pytest.raises(Refused, match="no request 'nobody'"):
        manager.allocate("nobody", 1)
    for count in (-5, 0, 13):
        with pytest.raises(Refused):
            manager.allocate("a", count)
    with pytest.raises(Refused, match="already"):
        manager.add("a", [1])
    for shape in ((0, 4), (11, 0), (11, -4)):
        with pytest.raises(Refused):
            manager.make(*shape)
    assert len(manager.table("a")) == 2  # what there was is still there
    manager.add("numpy", np.arange(5))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="cannot be asked"):
        manager.call("add", name={1}, tokens=[], salt=None)
    assert manager.match("numpy") == 4


@pytest.fixture(scope="module")
def tree() -> Iterator[SGLangTree]:
    with sglang_tree.start(64) as running:
        yield running


@pytest.mark.parametrize("core", ["python", "rust", "old"])
def test_sglang_splits_locks_and_evicts(tree: SGLangTree, core: sglang_tree.Core) -> None:
    tree.make(64, core=core)
    assert tree.publish([1, 2, 3, 4, 5, 6]) == 0
    assert tree.match([1, 2, 3, 9]) == 3
    assert tree.publish([1, 2, 3, 7, 8, 9]) == 3
    assert tree.match([1, 2, 3], salt="tenant") == 0
    assert tree.sizes() == Sizes(evictable=9, protected=0, free=55)
    assert tree.lock("a", [1, 2, 3, 4, 5, 6]) == 6
    assert tree.sizes() == Sizes(evictable=3, protected=6, free=55)
    assert tree.evict(9) == 3
    assert (tree.match([1, 2, 3, 4, 5, 6]), tree.match([1, 2, 3, 7, 8, 9])) == (6, 3)
    tree.unlock("a")
    assert tree.evict(9) == 6
    assert tree.sizes() == Sizes(evictable=0, protected=0, free=64)


def test_sglangs_tree_refuses_and_keeps_what_it_has(tree: SGLangTree) -> None:
    tree.make(16)
    tree.publish([1, 2, 3, 4])
    for size, page_size in ((16, 0), (16, 5), (16, 32), (0, 1)):
        with pytest.raises(Refused, match="no whole number of pages"):
            tree.make(size, page_size=page_size)
    with pytest.raises(Refused, match="no core"):
        tree.make(16, core="nosuch")  # type: ignore[arg-type]
    tree.lock("a", [1, 2, 3, 4])
    with pytest.raises(Refused, match="already"):
        tree.lock("a", [1, 2])
    with pytest.raises(Refused, match="priority"):
        tree.publish([5, 6], priority=1.5)  # type: ignore[arg-type]
    assert tree.sizes() == Sizes(evictable=0, protected=4, free=12)
    tree.unlock("a")
    with pytest.raises(Refused, match="holds no lock"):
        tree.unlock("a")


def test_sglangs_trees_agree_with_one_another(tree: SGLangTree) -> None:
    """In Python, in Rust, and the older one: what minikv is compared with is one thing."""
    for page_size in (1, 4):
        said = []
        for core in ("python", "rust", "old"):
            tree.make(128, page_size=page_size, core=core)
            rng = random.Random(page_size)
            heard: list[object] = []
            for _ in range(500):
                tokens = [rng.randrange(3) for _ in range(rng.randrange(4, 30))]
                cached = tree.publish(tokens)
                if cached is None:
                    heard.append(tree.evict(32))
                    cached = tree.publish(tokens)
                heard += [cached, tree.sizes(), tree.match(tokens[: len(tokens) // 2])]
            said.append(heard)
        assert said[0] == said[1] == said[2]
