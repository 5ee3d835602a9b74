"""A trace of requests through a cache of prefixes: how much would have been found?

    kvlab replay conversation_trace.jsonl --blocks 10000 --cache hash

A trace in Mooncake's form says of each request how many tokens its prompt has, and an id for each
of its blocks: equal ids, equal beginnings. No token is known, and none is needed: what a cache does
depends on which blocks are equal. Requests come one after the other, in the order of the file; each
is looked up, computed, and done before the next one comes. Answers are left out.

Three caches: "object-lru" keeps blocks as objects of their own and drops the one that was used
longest ago; "hash" is minikv's own pool of blocks (`minikv.blocks`), "radix" its tree
(`minikv.radix`), as an engine uses them: only full blocks are found again, and never a prompt's
last token.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvlab import workloads
from kvlab.workloads import MOONCAKE_BLOCK, TraceRequest, WorkloadError
from minikv.blocks import KVCacheManager, extend_hashes
from minikv.radix import RadixCache

Lookup = Callable[[TraceRequest], int]
"""Gives how many blocks from the start of a request are cached, and caches all of it."""


@dataclass(frozen=True)
class Replayed:
    """What a cache found of a trace. Rates over blocks, over tokens, and over requests differ."""

    requests: int
    blocks: int
    """of all prompts, the last one of each counted whole"""
    hits: int
    """of those"""
    tokens: int
    hit_tokens: int
    mean_of_ratios: float
    """of hits to blocks, request by request"""


def replay(path: Path, cache: str = "object-lru", blocks: int | None = None) -> Replayed:
    """Send a trace through a cache of so many blocks (None: as many as it can fill).

    Raises WorkloadError for a file that is no such trace, a cache that is none, or a request that
    is larger than the cache.
    """
    rows = workloads.read(path)
    if not all(row.blocks for row in rows):
        raise WorkloadError(f"{path} has no block ids: what its prompts share is not known.")
    if cache not in CACHES:
        raise WorkloadError(f"There is no cache {cache!r}; there are {', '.join(CACHES)}.")
    longest = max(len(row.blocks) for row in rows)
    if blocks is None:
        blocks = sum(len(row.blocks) for row in rows)
    if blocks < longest:
        raise WorkloadError(f"A request of {longest} blocks does not fit into {blocks}.")
    return count(rows, CACHES[cache](blocks))


def count(rows: Iterable[TraceRequest], lookup: Lookup) -> Replayed:
    pairs = [(row, lookup(row)) for row in rows]
    found = [min(hits * MOONCAKE_BLOCK, row.input) for row, hits in pairs]
    return Replayed(
        requests=len(pairs),
        blocks=sum(len(row.blocks) for row, _ in pairs),
        hits=sum(hits for _, hits in pairs),
        tokens=sum(row.input for row, _ in pairs),
        hit_tokens=sum(found),
        mean_of_ratios=statistics.fmean(hits / len(row.blocks) for row, hits in pairs),
    )


def object_lru(blocks: int) -> Lookup:
    kept: OrderedDict[int, None] = OrderedDict()

    def lookup(row: TraceRequest) -> int:
        hits = 0
        while hits < len(row.blocks) and row.blocks[hits] in kept:
            hits += 1
        for block in row.blocks:  # from head to tail: the tail is the youngest
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > blocks:
            kept.popitem(last=False)
        return hits

    return lookup


def block_hashes(blocks: int) -> Lookup:
    manager = KVCacheManager(blocks + 1, _TOKENS)  # and the null block

    def lookup(row: TraceRequest) -> int:
        tokens, hashes = as_tokens(row), list[bytes]()
        extend_hashes(hashes, tokens, _TOKENS)
        hits = manager.match(hashes, len(tokens))
        assert manager.allocate("one", len(tokens), hits)
        manager.publish("one", hashes, len(tokens))
        manager.release("one", len(tokens))
        return len(hits)

    return lookup


_TOKENS = 2


def as_tokens(row: TraceRequest) -> list[int]:
    """The prompt with blocks of 2 tokens in the place of 512: two for a full block, one for a last
    one that is not full. Which blocks are found depends on no more than that."""
    full = row.input // MOONCAKE_BLOCK
    tokens = [row.blocks[i // _TOKENS] for i in range(_TOKENS * full)]
    return tokens + list(row.blocks[full:])


def radix_tree(blocks: int) -> Lookup:
    tree = RadixCache(blocks)  # a page is one token: a block's id

    def lookup(row: TraceRequest) -> int:
        full, last = full_blocks(row)
        held, node = tree.match(full[:last])
        tree.lock(node)
        wanted = len(row.blocks) - len(held)
        tree.evict(wanted - len(tree.free_pages))
        new = [tree.free_pages.pop() for _ in range(wanted)]
        there = tree.publish(full, held + new)
        # What is not full, and what the tree had already, is free again.
        tree.free_pages += new[: there - len(held)] + new[len(full) - len(held) :]
        tree.unlock(node)
        return len(held)

    return lookup


def full_blocks(row: TraceRequest) -> tuple[list[int], int]:
    """Its full blocks, and how many of them can be hit: one token is computed in any case."""
    full = row.input // MOONCAKE_BLOCK
    return list(row.blocks[:full]), (row.input - 1) // MOONCAKE_BLOCK


CACHES: dict[str, Callable[[int], Lookup]] = {
    "object-lru": object_lru,
    "hash": block_hashes,
    "radix": radix_tree,
}


def show(found: Replayed) -> None:
    """Print what was found, and of what."""
    print(f"{found.requests:,} requests")
    for what, hits, of in (
        ("blocks", found.hits, found.blocks),
        ("tokens", found.hit_tokens, found.tokens),
    ):
        print(f"{hits:,} of {of:,} {what}: {hits / of:.4f}")
    print(f"mean of the requests' own shares of blocks: {found.mean_of_ratios:.4f}")
