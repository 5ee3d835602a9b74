"""minikv's radix tree and SGLang's own, told the same things: do they do the same?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from engine_help import need

from kvlab.engines import sglang_tree
from kvlab.engines.sglang_tree import SGLangTree, Sizes
from minikv.radix import Node, Policy, RadixCache

need("sglang")

STEPS = 4_000
OFTEN = {"publish": 8, "match": 4, "lock": 2, "unlock": 2, "evict": 1, "reset": 0.02}
SHAPES = [
    (core, policy, page_size)
    for core in ("python", "rust")
    for policy in ("lru", "lfu", "priority")
    for page_size in (1, 4)
]


class Mine:
    """minikv's tree, told in the words of `SGLangTree`, which counts tokens."""

    def __init__(self, size: int, page_size: int, policy: Policy) -> None:
        self.tree = RadixCache(size // page_size, page_size, policy)
        self.locks: dict[str, Node] = {}

    def match(self, tokens: list[int], salt: str | None) -> int:
        return len(self.tree.match(tokens, salt)[0]) * self.tree.page_size

    def publish(self, tokens: list[int], salt: str | None, *, priority: int) -> int | None:
        tree = self.tree
        whole = tokens[: len(tokens) // tree.page_size * tree.page_size]
        held, _ = tree.match(whole, salt)
        wanted = len(whole) // tree.page_size - len(held)
        if wanted > len(tree.free_pages):
            return None
        new = [tree.free_pages.pop() for _ in range(wanted)]
        return tree.publish(whole, held + new, salt, priority)

    def lock(self, name: str, tokens: list[int], salt: str | None) -> int:
        pages, self.locks[name] = self.tree.match(tokens, salt)
        self.tree.lock(self.locks[name])
        return len(pages) * self.tree.page_size

    def unlock(self, name: str) -> None:
        self.tree.unlock(self.locks.pop(name))

    def evict(self, count: int) -> int:
        return self.tree.evict(-(-count // self.tree.page_size)) * self.tree.page_size

    def reset(self) -> None:
        self.tree.reset()
        self.locks.clear()

    def sizes(self) -> Sizes:
        tree, size = self.tree, self.tree.page_size
        assert len(tree.free_pages) + tree.cached_pages == tree.num_pages
        return Sizes(
            evictable=tree.evictable_pages * size,
            protected=tree.protected_pages * size,
            free=len(tree.free_pages) * size,
        )


@pytest.fixture(scope="module")
def theirs() -> Iterator[SGLangTree]:
    with sglang_tree.start(64) as running:
        yield running


@pytest.mark.parametrize(("core", "policy", "page_size"), SHAPES)
def test_the_same_matches_evictions_and_accounts(
    theirs: SGLangTree, core: sglang_tree.Core, policy: Policy, page_size: int
) -> None:
    """Sequences of a few families are looked for, locked, published and evicted."""
    size = 160
    theirs.make(size, page_size=page_size, core=core, policy=policy)
    mine = Mine(size, page_size, policy)
    rng = random.Random(f"{policy} {page_size}")
    families = [[rng.randrange(3) for _ in range(60)] for _ in range(4)]
    seen = {"cached": 0, "full": 0, "evicted": 0}
    for step in range(STEPS):

        def both(what: str, *words: Any, **more: Any) -> Any:
            a, b = (getattr(one, what)(*words, **more) for one in (mine, theirs))
            assert a == b, f"step {step}, {what} {words} {more}: {a}, SGLang {b}"  # noqa: B023
            return a

        beginning = rng.choice(families)[: rng.randrange(50)]
        tokens = beginning + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        salt = rng.choice((None, None, None, "a"))
        what = rng.choices(
            ("publish", "match", "lock", "unlock", "evict", "reset"), (8, 4, 2, 2, 1, 0.02)
        )[0]
        if what == "publish":
            found = both("publish", tokens, salt, priority=rng.randrange(3))
            seen["cached"] += bool(found)
            if found is None:
                seen["full"] += 1
                seen["evicted"] += both("evict", rng.randrange(1, 40))
        elif what == "match":
            both("match", tokens, salt)
        elif what == "lock" and len(mine.locks) < 3:
            both("lock", f"r{step}", tokens, salt)
        elif what == "unlock" and mine.locks:
            both("unlock", rng.choice(list(mine.locks)))
        elif what == "evict":
            seen["evicted"] += both("evict", rng.randrange(1, 20))
        elif what == "reset":
            both("reset")
        both("sizes")
    assert all(seen.values()), seen
