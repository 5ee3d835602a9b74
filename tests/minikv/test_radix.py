"""The radix tree by hand, and against a list of all that was ever published."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minikv.radix import Node, RadixCache


def publish(tree: RadixCache, tokens: list[int], **words: object) -> int:
    """As an engine does: what is there stays, and the rest gets new pages."""
    whole = tokens[: len(tokens) // tree.page_size * tree.page_size]
    held, _ = tree.match(whole, words.get("salt"))  # type: ignore[arg-type]
    new = [tree.free_pages.pop() for _ in range(len(whole) // tree.page_size - len(held))]
    return tree.publish(whole, held + new, **words)  # type: ignore[arg-type]


def test_an_edge_is_split_where_sequences_part() -> None:
    tree = RadixCache(20)
    assert publish(tree, [1, 2, 3, 4, 5]) == 0
    assert publish(tree, [1, 2, 3, 8, 9]) == 3
    (trunk,) = tree.root.children.values()
    assert trunk.tokens == (1, 2, 3)
    assert sorted(child.tokens for child in trunk.children.values()) == [(4, 5), (8, 9)]
    pages, node = tree.match([1, 2, 3, 4, 7])
    assert (len(pages), node.tokens) == (4, (4,))  # a look splits, too
    assert tree.cached_pages == 7


def test_whole_pages_alone_are_known() -> None:
    tree = RadixCache(20, page_size=4)
    publish(tree, [1, 2, 3, 4, 5, 6])
    assert tree.cached_pages == 1
    assert tree.match([1, 2, 3])[0] == []
    assert len(tree.match([1, 2, 3, 4, 5, 6, 7, 8])[0]) == 1
    assert tree.match([1, 2, 3, 9])[0] == []


def test_salts_share_nothing() -> None:
    tree = RadixCache(20)
    publish(tree, [1, 2, 3], salt="a")
    assert tree.match([1, 2, 3])[0] == tree.match([1, 2, 3], "b")[0] == []
    assert len(tree.match([1, 2, 3], "a")[0]) == 3


def test_leaves_go_first_and_what_is_locked_stays() -> None:
    tree = RadixCache(20)
    publish(tree, [1, 2, 3])
    publish(tree, [1, 2, 8, 9])
    publish(tree, [5, 6])
    _, node = tree.match([1, 2, 3])
    tree.lock(node)
    assert (tree.evictable_pages, tree.protected_pages) == (4, 3)
    assert tree.evict(3) == 4  # 8 and 9, then 5 and 6: 3 and what lies above are locked
    tree.unlock(node)
    assert tree.evict(1) == 1  # the leaf, and not its parent
    assert len(tree.match([1, 2, 3])[0]) == 2


@pytest.mark.parametrize(
    ("policy", "stays"), [("lru", [3]), ("lfu", [1, 2]), ("priority", [7, 8, 9])]
)
def test_who_is_evicted_first(policy, stays) -> None:
    tree = RadixCache(20, policy=policy)
    publish(tree, [1, 2])
    publish(tree, [1, 2])
    publish(tree, [7, 8, 9], priority=1)
    publish(tree, [3])
    tree.evict(tree.cached_pages - len(stays))
    assert len(tree.match(stays)[0]) == len(stays)
    assert tree.cached_pages == len(stays)


POLICIES = ["lru", "lfu", "priority"]


class Machine(RuleBasedStateMachine):
    """Requests look, lock, publish and go; nothing is found that was not published, no page is in
    two places, and what is locked is found again."""

    @initialize(
        page_size=st.sampled_from([1, 2]), policy=st.sampled_from(["lru", "lfu", "priority"])
    )
    def begin(self, page_size, policy):
        self.tree = RadixCache(24 // page_size, page_size, policy)
        self.published: list[list[int]] = []
        self.held: list[tuple[list[int], list[int], Node]] = []

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)

    @rule(tokens=tokens)
    def look(self, tokens):
        pages, _ = self.tree.match(tokens)
        found = len(pages) * self.tree.page_size
        assert any(one[:found] == tokens[:found] for one in self.published) or not found

    @rule(tokens=tokens, priority=st.integers(0, 2))
    def put(self, tokens, priority):
        need = len(tokens) // self.tree.page_size - len(self.tree.match(tokens)[0])
        self.tree.evict(max(0, need - len(self.tree.free_pages)))
        need = len(tokens) // self.tree.page_size - len(self.tree.match(tokens)[0])
        if need <= len(self.tree.free_pages):
            publish(self.tree, tokens, priority=priority)
            self.published.append(tokens)

    @rule(tokens=tokens)
    @precondition(lambda self: len(self.held) < 3)
    def hold(self, tokens):
        pages, node = self.tree.match(tokens)
        self.tree.lock(node)
        self.held.append((tokens[: len(pages) * self.tree.page_size], pages, node))

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: self.held)
    def let_go(self, which):
        self.tree.unlock(self.held.pop(which % len(self.held))[2])

    @rule(count=st.integers(1, 30))
    def evict(self, count):
        evictable = self.tree.evictable_pages
        assert self.tree.evict(count) >= min(count, evictable)

    @invariant()
    def pages_are_in_one_place(self):
        if not hasattr(self, "tree"):
            return
        nodes, stack = [], [self.tree.root]
        while stack:
            nodes.append(stack.pop())
            stack += nodes[-1].children.values()
        pages = self.tree.free_pages + [page for node in nodes for page in node.pages]
        assert sorted(pages) == list(range(self.tree.num_pages))
        assert self.tree.cached_pages == sum(len(node.pages) for node in nodes)
        assert self.tree.protected_pages == sum(len(n.pages) for n in nodes if n.locks)

    @invariant()
    def what_is_held_is_found(self):
        for tokens, pages, _ in getattr(self, "held", []):
            assert self.tree.match(tokens)[0] == pages


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
