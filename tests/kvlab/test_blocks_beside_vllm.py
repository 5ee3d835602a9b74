"""minikv's blocks and vLLM's own KVCacheManager, told the same things: do they do the same?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_help import need

from kvlab.engines import vllm_blocks
from kvlab.engines.vllm_blocks import VLLMBlocks
from minikv.blocks import Cleared, Event, KVCacheManager, Removed, Stored, extend_hashes

need("vllm")

STEPS = 4_000
"""Of each of the five shapes: 20,000."""
SHAPES = ((8, 1), (12, 4), (40, 4), (33, 16), (200, 2))
"""Blocks with the null block, and tokens of a block."""


@dataclass
class Request:
    tokens: list[int]
    salt: str | None
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0


class Mine:
    """minikv's manager, told of requests in the words of `VLLMBlocks`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = KVCacheManager(num_blocks, block_size)
        self.manager.pool.events = []
        self.requests: dict[str, Request] = {}

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        self.requests[name] = Request(list(tokens), salt)
        self._hash(name)

    def append(self, name: str, token: int) -> None:
        self.requests[name].tokens.append(token)
        self._hash(name)

    def _hash(self, name: str) -> None:
        one = self.requests[name]
        extend_hashes(one.hashes, one.tokens, self.manager.block_size, one.salt)

    def match(self, name: str) -> int:
        one = self.requests[name]
        return len(self.manager.match(one.hashes, len(one.tokens))) * self.manager.block_size

    def allocate(self, name: str, count: int, *, must_fit: bool) -> bool:
        one = self.requests[name]
        hits = self.manager.match(one.hashes, len(one.tokens)) if one.computed == 0 else []
        end = one.computed + len(hits) * self.manager.block_size + count
        fit = len(one.tokens) if must_fit else 0
        if not self.manager.allocate(name, end, hits, must_fit=fit):
            return False
        one.computed = end
        self.manager.publish(name, one.hashes, end)
        return True

    def table(self, name: str) -> list[int]:
        return self.manager.block_ids(name)

    def free(self, name: str) -> None:
        self.manager.release(name, self.requests.pop(name).computed)

    def reset(self) -> bool:
        return self.manager.pool.reset()

    def free_queue(self) -> list[int]:
        return list(self.manager.pool.free_queue)

    def events(self) -> list[dict[str, Any]]:
        events, self.manager.pool.events = self.manager.pool.events, []
        assert events is not None
        return [told(event) for event in events]


def told(event: Event) -> dict[str, Any]:
    """An event in the words of `VLLMBlocks.events`; minikv's knows hashes, and no tokens."""
    match event:
        case Stored(hashes, parent):
            return {"stored": list(hashes), "parent": parent}
        case Removed(hash):
            return {"removed": [hash]}
        case Cleared():
            return {"cleared": True}


@pytest.fixture(scope="module")
def theirs() -> Iterator[VLLMBlocks]:
    with vllm_blocks.start(*SHAPES[0]) as running:
        yield running


class Both:
    """Tells both the same, and compares all that can be seen."""

    def __init__(self, theirs: VLLMBlocks, shape: tuple[int, int]) -> None:
        theirs.make(*shape)
        self.theirs, self.mine = theirs, Mine(*shape)
        self.steps = 0

    def do(self, what: str, *words: Any, **more: Any) -> Any:
        mine, theirs = (getattr(one, what)(*words, **more) for one in (self.mine, self.theirs))
        self.steps += 1
        assert mine == theirs, f"step {self.steps}, {what} {words} {more}: {mine}, vLLM {theirs}"
        return mine

    def compare(self, what: str) -> None:
        queue = self.theirs.free_queue()
        assert self.mine.free_queue() == queue, f"step {self.steps}, free queue after {what}"
        events = [
            {k: v for k, v in event.items() if k != "tokens"} for event in self.theirs.events()
        ]
        assert self.mine.events() == events, f"step {self.steps}, events after {what}"
        for name in self.mine.requests:
            assert self.mine.table(name) == self.theirs.table(name), f"step {self.steps}, {name}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_the_same_hits_blocks_free_queue_and_events(
    theirs: VLLMBlocks, shape: tuple[int, int]
) -> None:
    """Requests of a few families come, are given slots in pieces, grow, and leave or are aborted;
    what does not fit waits; now and then all is forgotten."""
    num_blocks, block_size = shape
    rng = random.Random(f"{shape}")
    both = Both(theirs, shape)
    longest = (num_blocks - 1) * block_size
    families = [[rng.randrange(5) for _ in range(longest)] for _ in range(3)]
    count = 0
    seen = {"hit": 0, "refused": 0, "reset": 0, "evicted": 0}
    while both.steps < STEPS:
        names = list(both.mine.requests)
        what = rng.choices(("add", "allocate", "append", "free", "reset"), (3, 6, 2, 2, 0.3))[0]
        if what == "add" and len(names) < 8:
            count += 1
            shared = rng.choice(families)[: rng.randrange(longest)]
            tokens = [
                *shared,
                *(rng.randrange(5) for _ in range(rng.randrange(1, 2 * block_size + 1))),
            ]
            both.do("add", f"r{count}", tokens[:longest], rng.choice((None, None, "a", "b")))
            seen["hit"] += both.do("match", f"r{count}") > 0
        elif what == "allocate" and names:
            name = rng.choice(names)
            one = both.mine.requests[name]
            hits = both.mine.match(name) if one.computed == 0 else 0
            left = len(one.tokens) - one.computed - hits
            if left:
                new = rng.randint(1, left)
                done = both.do("allocate", name, new, must_fit=rng.random() < 0.3)
                seen["refused"] += not done
        elif what == "append" and names:
            name = rng.choice(names)
            one = both.mine.requests[name]
            if one.computed == len(one.tokens) < longest:
                both.do("append", name, rng.randrange(5))
        elif what == "free" and names:
            both.do("free", rng.choice(names))
        elif what == "reset":
            seen["reset"] += both.do("reset")
        both.compare(what)
    assert all(seen[what] for what in ("hit", "refused")), seen
