"""Which beginning of this prompt has KV already, when requests share beginnings of any length?

The other answer to the question of `blocks.py`. There a block is found by the hash of all tokens up
to its end. Here cached sequences form a tree: an edge carries a run of tokens and their pages of
KV, and sequences that begin alike share the edges from the root. To match is to walk from the root
for as long as the tokens agree. Where they part in the middle of an edge, it is split in two.

KV gets into the tree when it has been computed (`publish`), not before; a request locks the path
that it uses, so that nobody evicts it (`lock`, `unlock`). Eviction takes leaves only, for what lies
behind an evicted node could not be reached any more: the oldest leaf, then its parent, if that is a
leaf now.

A page is `page_size` tokens, as a block of `blocks.py`; the tree knows whole pages only. Ages are a
clock that ticks with each look, so nothing here depends on time.

The rules are those of SGLang 0.5.23: srt/mem_cache/unified_cache/unified_tree_core.py (match,
insert, split, ages), components/full.py (locks, eviction), srt/mem_cache/evict_policy.py. The tree
comes from Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Policy = Literal["lru", "lfu", "priority"]
Age = tuple[int, int]
"""When a node was last used: the clock's tick, and how far above the node that was looked for."""


class Node:
    """An edge and the place where it ends: a run of tokens with their pages of KV."""

    def __init__(
        self,
        tokens: Sequence[int],
        pages: list[int],
        parent: Node | None,
        salt: str | None,
        priority: int,
        age: Age,
    ) -> None:
        self.tokens = tuple(tokens)
        """Whole pages of tokens, at least one; none at the root."""
        self.pages = pages
        self.parent = parent
        self.salt = salt
        self.priority = priority
        self.age = age
        self.children: dict[tuple[str | None, tuple[int, ...]], Node] = {}
        """By salt and first page: two children of one node differ in one of these."""
        self.locks = 0
        """Requests that use this node; then they use all above it, too."""
        self.hits = 0
        """How often it was published."""
        self.queued = False
        """Whether it stands in the queue of leaves to evict."""

    @property
    def is_evictable(self) -> bool:
        return self.parent is not None and not self.children and not self.locks


class RadixCache:
    """A tree of cached pages over a pool of `num_pages`.

    policy: what is evicted first. "lru": what was not looked for or published longest; "lfu": what
    was published least often; "priority": what has the lowest priority; both by age among equals.
    """

    def __init__(self, num_pages: int, page_size: int = 1, policy: Policy = "lru") -> None:
        if page_size < 1 or num_pages < 1:
            raise ValueError(f"{num_pages} pages of {page_size} tokens are no pool")
        self.page_size = page_size
        self.policy = policy
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """Forget everything, locks too."""
        self._clock = 0
        self.free_pages = list(range(self.num_pages))
        # Leaves, the least worth first, each at most once. A use makes a node worth more and leaves
        # its place here as it is: it is looked at again when it is its turn (`evict`). So neither a
        # look nor an eviction takes longer when more is cached.
        self._queue: list[tuple[tuple[int, Age], int, Node]] = []
        self.root = Node((), [], None, None, 0, (0, 0))
        self.cached_pages = 0
        """In the tree, locked or not."""
        self.protected_pages = 0
        """In the tree, and locked."""
        self.evicted_pages = 0
        """So far."""

    @property
    def evictable_pages(self) -> int:
        return self.cached_pages - self.protected_pages

    def match(self, tokens: Sequence[int], salt: str | None = None) -> tuple[list[int], Node]:
        """The pages of the longest beginning of `tokens` that is cached, and the node it ends at.

        Looking counts as use, of this node and, a little less, of each above it. An edge of which
        only a part agrees is split, so that the match ends at a node.
        """
        node, pages, place = self.root, list[int](), 0
        while child := self._child(node, tokens, place, salt):
            agreed = self._agreement(child, tokens, place)
            node = child if agreed == len(child.tokens) else self._split(child, agreed)
            pages += node.pages
            place += agreed
            if node is not child:
                break
        tick, above = self._tick(), 0
        used: Node | None = node
        while used is not None:
            used.age = (tick, -above)
            used, above = used.parent, above + 1
        return pages, node

    def publish(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        salt: str | None = None,
        priority: int = 0,
    ) -> int:
        """Put the whole pages of `tokens` and their KV into the tree; how many tokens were there.

        pages: one for each whole page of tokens. Those of tokens that were there already are not
        taken: the tree keeps its own, and the caller's stay the caller's, to free.
        """
        whole = len(tokens) // self.page_size * self.page_size
        tokens = tokens[:whole]
        self._use(self.root)
        node, place = self.root, 0
        while child := self._child(node, tokens, place, salt):
            self._use(child)
            agreed = self._agreement(child, tokens, place)
            node = child if agreed == len(child.tokens) else self._split(child, agreed)
            node.priority = max(node.priority, priority)
            node.hits += 1
            place += agreed
        if place < whole:
            new = list(pages[place // self.page_size : whole // self.page_size])
            leaf = Node(tokens[place:], new, node, salt, priority, (self._tick(), 0))
            leaf.hits = 1
            node.children[self._key(tokens, place, salt)] = leaf
            self.cached_pages += len(new)
            self._enqueue(leaf)
        return place

    def lock(self, node: Node) -> None:
        """Keep a node and all above it from eviction; as often as it is locked, it is unlocked."""
        while node.parent is not None:
            self.protected_pages += len(node.pages) * (node.locks == 0)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            self.protected_pages -= len(node.pages) * (node.locks == 0)
            self._enqueue(node)
            node = node.parent

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages`, if so many are evictable: whole leaves, so it may be more.

        Returns how many were freed; they are in `free_pages` then.
        """
        freed = 0
        while freed < num_pages and self._queue:
            worth, _, node = heapq.heappop(self._queue)
            node.queued = False
            parent = node.parent
            if parent is None or self._worth(node) > worth:  # it was used since
                self._enqueue(node)
            elif node.is_evictable:
                del parent.children[self._key(node.tokens, 0, node.salt)]
                node.parent = None
                self.free_pages += node.pages
                freed += len(node.pages)
                self._enqueue(parent)
        self.cached_pages -= freed
        self.evicted_pages += freed
        return freed

    # Inside.

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _use(self, node: Node) -> None:
        node.age = (self._tick(), 0)

    def _key(
        self, tokens: Sequence[int], place: int, salt: str | None
    ) -> tuple[str | None, tuple[int, ...]]:
        return salt, tuple(tokens[place : place + self.page_size])

    def _child(
        self, node: Node, tokens: Sequence[int], place: int, salt: str | None
    ) -> Node | None:
        """The child that begins with the page of tokens at `place`; None if there is none."""
        if place + self.page_size > len(tokens):
            return None
        return node.children.get(self._key(tokens, place, salt))

    def _agreement(self, child: Node, tokens: Sequence[int], place: int) -> int:
        """How many tokens of the child's edge agree with those from `place` on: whole pages."""
        size = self.page_size
        for start in range(0, len(child.tokens), size):
            if (
                tuple(tokens[place + start : place + start + size])
                != child.tokens[start : start + size]
            ):
                return start
        return len(child.tokens)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge after `at` tokens; the new node, which is the upper one."""
        parent, page = node.parent, at // self.page_size
        assert parent is not None
        upper = Node(
            node.tokens[:at], node.pages[:page], parent, node.salt, node.priority, (self._tick(), 0)
        )
        upper.hits, upper.locks = node.hits, node.locks
        parent.children[self._key(node.tokens, 0, node.salt)] = upper
        upper.children[self._key(node.tokens, at, node.salt)] = node
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[page:], upper
        self._use(node)
        return upper

    def _enqueue(self, node: Node) -> None:
        if node.is_evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (self._worth(node), id(node), node))

    def _worth(self, node: Node) -> tuple[int, Age]:
        """The least is evicted first."""
        first = {"lru": 0, "lfu": node.hits, "priority": node.priority}[self.policy]
        return first, node.age


class Key(NamedTuple):
    """Under what the tree finds a request's tokens."""

    tokens: Sequence[int]
    salt: str | None


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree has of a request, and where it ends."""

    pages: list[int]
    node: Node

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(slots=True)
class Table:
    """A request's pages, in the order of its tokens; the first `num_shared` are the tree's, and
    `node`, where they end, is locked. The others are the request's own."""

    pages: list[int]
    num_shared: int
    node: Node


class RadixKVCacheManager:
    """Block tables over a tree: the calls of `blocks.KVCacheManager`, with SGLang's rules.

    A page belongs to the tree, to one request, or to nobody (`RadixCache.free_pages`); page 0, the
    null block, to none of them. A request publishes what it has computed: its pages become the
    tree's. Where the tree had the same tokens already, because another request computed them at the
    same time, the tree's pages take their place in the table and the request's own are freed
    (SGLang 0.5.23, srt/mem_cache/unified_radix_cache.py, `cache_unfinished_req`).
    """

    publishes_early = False
    caching = True

    def __init__(self, num_blocks: int, block_size: int, policy: Policy = "lru") -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block); got {num_blocks}"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.tree = RadixCache(num_blocks, block_size, policy)
        self.tree.free_pages.remove(0)
        self.tables: dict[str, Table] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be had: free ones, and those that eviction would free."""
        return len(self.tree.free_pages) + self.tree.evictable_pages

    def reset(self) -> bool:
        """Forget all cached pages; False, and nothing happens, while a request holds some."""
        if self.tables:
            return False
        self.tree.reset()
        self.tree.free_pages.remove(0)
        return True

    def key(self, token_ids: Sequence[int], salt: str | None, hashes: list[bytes]) -> Key:
        """A tree compares the tokens themselves; it has no use for hashes."""
        return Key(token_ids, salt or None)

    def match(self, key: Key, num_tokens: int) -> Match:
        """The longest cached beginning of a request of `num_tokens` tokens, the last never in it:
        the model has to run on at least one token to give logits."""
        usable = (num_tokens - 1) // self.block_size * self.block_size
        return Match(*self.tree.match(key.tokens[:usable], key.salt))

    def allocate(
        self, request_id: str, num_tokens: int, hits: Match | None = None, must_fit: int = 0
    ) -> bool:
        """Give the request slots for its first `num_tokens` tokens, `hits` (at admission) included.

        must_fit: refuse unless this many tokens would fit now, though fewer get slots.
        Returns False, with nothing given, if eviction could not free enough pages.
        """
        table = self.tables.get(request_id)
        if table is None:
            hits = hits or Match([], self.tree.root)
            table = Table(list(hits.pages), len(hits), hits.node)
            self.tree.lock(table.node)  # before it is counted what eviction can free
        count = -(-num_tokens // self.block_size) - len(table.pages)
        count_to_fit = -(-must_fit // self.block_size) - len(table.pages)
        if max(count, count_to_fit) > self.num_free:
            if request_id not in self.tables:
                self.tree.unlock(table.node)
            return False
        self.tables[request_id] = table
        free = self.tree.free_pages
        self.tree.evict(count - len(free))
        for _ in range(count):
            table.pages.append(free.pop())
        return True

    def publish(self, request_id: str, key: Key, num_tokens: int) -> None:
        """Let others find the request's pages that are full with its first `num_tokens` tokens:
        all of them hold KV. A request that holds no pages has nothing to publish."""
        table = self.tables.get(request_id)
        end = num_tokens // self.block_size
        if table is None or end <= table.num_shared:
            return
        tokens = key.tokens[: end * self.block_size]
        found = self.tree.publish(tokens, table.pages[:end], key.salt) // self.block_size
        self.tree.free_pages += table.pages[table.num_shared : found]
        pages, node = self.tree.match(tokens, key.salt)
        self.tree.lock(node)
        self.tree.unlock(table.node)
        table.pages[:end] = pages
        table.num_shared, table.node = end, node

    def release(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the request's own pages, and unlock those that it shares with the tree."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.tree.free_pages += table.pages[table.num_shared :]
            self.tree.unlock(table.node)

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty if it holds no pages."""
        table = self.tables.get(request_id)
        return list(table.pages) if table else []
