"""SGLang's own radix tree, to ask it what it finds, keeps and evicts.

    from kvlab.engines import sglang_tree

    with sglang_tree.start(size=64, core="rust") as tree:
        tree.publish([1, 2, 3, 4, 5, 6])
        print(tree.match([1, 2, 3, 9]), tree.evict(4), tree.sizes())

No server and no model: tree and pool are imported in SGLang's environment
(`kvlab.inside.sglang_tree`) and told of requests as SGLang's scheduler would tell them. A *slot*
is room for the KV of one token; a *page* is page_size of them, and the tree knows whole pages only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvlab.engines.worker import Worker

Core = Literal["python", "rust", "old"]
Policy = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]


@dataclass(frozen=True)
class Sizes:
    """Slots of the pool. Together they are all of it, unless a request holds some outside of the
    tree."""

    evictable: int
    """in the tree, and locked by nobody"""
    protected: int
    """in the tree, and locked"""
    free: int


def start(
    size: int,
    *,
    page_size: int = 1,
    core: Core = "rust",
    policy: Policy = "lru",
    deadline: float = 300,
) -> SGLangTree:
    """Start a process with an empty tree over `size` free slots, a multiple of page_size.

    core: UnifiedRadixCache with its tree in Rust (SGLang's default) or in Python, or "old" for
    RadixCache. policy: what is evicted first; "lru" is SGLang's default.
    """
    return SGLangTree(size, page_size, core, policy, deadline).start()


class SGLangTree(Worker):
    """A process that holds a tree; `start` makes one."""

    name = "SGLang's radix tree"
    _program = "sglang_tree"
    _environment_name = "sglang"

    def __init__(
        self, size: int, page_size: int, core: Core, policy: Policy, deadline: float
    ) -> None:
        super().__init__(f"with {size} slots", deadline=deadline)
        self._shape: dict[str, Any] = {
            "size": size,
            "page_size": page_size,
            "core": core,
            "policy": policy,
        }

    def _begin(self) -> None:
        self.call("make", **self._shape)

    def make(
        self, size: int, *, page_size: int = 1, core: Core = "rust", policy: Policy = "lru"
    ) -> None:
        """Begin anew, with another tree and pool, both empty."""
        self.call("make", size=size, page_size=page_size, core=core, policy=policy)

    def match(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens from the start are in the tree: whole pages. That they were looked for
        counts as use, and a node may be split."""
        found: int = self.call("match", tokens=list(tokens), salt=salt)
        return found

    def publish(
        self, tokens: Sequence[int], salt: str | None = None, *, priority: int = 0
    ) -> int | None:
        """Take slots for what is not in the tree yet, of full pages, and put it there.

        Returns how many tokens were there before; None, and nothing changed but ages and splits,
        if too few slots are free: evict() then.
        """
        found: int | None = self.call("publish", tokens=list(tokens), salt=salt, priority=priority)
        return found

    def lock(self, name: str, tokens: Sequence[int], salt: str | None = None) -> int:
        """Keep what is cached of these tokens from eviction, until unlock(name)."""
        found: int = self.call("lock", name=name, tokens=list(tokens), salt=salt)
        return found

    def unlock(self, name: str) -> None:
        self.call("unlock", name=name)

    def evict(self, count: int) -> int:
        """Free at least `count` slots if so many are evictable; whole leaves go, so it may be more.
        Returns how many were freed."""
        done: int = self.call("evict", count=count)
        return done

    def reset(self) -> None:
        """Forget everything, locks too."""
        self.call("reset")

    def sizes(self) -> Sizes:
        return Sizes(**self.call("sizes"))
