"""Where does KV live, and who may use it again?

KV memory is cut into blocks of `block_size` token slots. A request owns a block table: the list of
its blocks in the order of its tokens; token i sits in slot i % block_size of block
table[i // block_size]. Only whole blocks are handed out, so at most block_size - 1 slots of a
request are unused.

A full block can be recognised by its hash. The hash covers the block's tokens and, through the
parent's hash, every token before it, because keys and values depend on all of them. A block whose
last owner has left keeps its content and its hash: the queue of free blocks *is* the prefix cache,
in the order of eviction. It costs no memory that would otherwise be used.

Nothing here knows tensors or text: a block is a number, a request is an id and its hashes.

The rules are those of vLLM 0.32.0: v1/core/block_pool.py (`BlockPool`),
v1/core/kv_cache_manager.py (`allocate_slots`), v1/core/single_type_kv_cache_manager.py
(`FullAttentionManager`), v1/core/kv_cache_utils.py (`hash_block_tokens`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cbor2


def sha256_cbor(value: Any) -> bytes:
    """SHA-256 over canonical CBOR: 32 bytes, the same in every process and language."""
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


# The parent of a first block. vLLM hashes the same seed, unless PYTHONHASHSEED is set: then that.
# Its keys are these under prefix_caching_hash_algo="sha256_cbor"; its default hashes pickles.
# minikv ignores the variable, so keys are equal in all processes whatever their environment says.
NONE_HASH = sha256_cbor("vllm-none-hash")


def block_hash(parent: bytes | None, token_ids: Sequence[int], extra: Any = None) -> bytes:
    """The hash of one full block after `parent` (None: it is the first)."""
    return sha256_cbor((parent or NONE_HASH, tuple(token_ids), extra))


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str | None = None
) -> None:
    """Append to `hashes` those of the blocks of `token_ids` that became full since the last call.

    A salt enters the first block's hash, and through the chain all others: requests with different
    salts never share a block, whatever their tokens.
    """
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        parent = hashes[-1] if hashes else None
        hashes.append(block_hash(parent, token_ids[start : start + block_size], extra))


@dataclass(eq=False, slots=True)
class Block:
    """block_id: row in the KV tensors. ref_cnt: requests that own it now. hash: of its content,
    once it is full and published; None before that and after eviction."""

    block_id: int
    ref_cnt: int = 0
    hash: bytes | None = None


@dataclass(frozen=True)
class Stored:
    """Blocks can be found from now on: their hashes, one the parent of the next."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Of the first; None if it is a first block."""


@dataclass(frozen=True)
class Removed:
    """A block was handed out again: this content can no longer be found in it."""

    hash: bytes


@dataclass(frozen=True)
class Cleared:
    """All content was forgotten."""


Event = Stored | Removed | Cleared


class BlockPool:
    """All blocks of the KV cache; block 0 is the null block, never handed out.

    num_blocks: with the null block, so num_blocks - 1 are usable.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block); got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Next to be handed out first. Ordered, and still O(1) to take a block out of the middle,
        # which is what a cache hit does. (vLLM links the blocks themselves into a list.)
        self.free_queue: OrderedDict[int, Block] = OrderedDict((b.block_id, b) for b in self.blocks)
        self.free_queue.pop(0)
        # Hash -> the blocks that carry it, oldest first. Two requests that compute the same block
        # at the same time leave two: neither table may change under a running request.
        self.cached: dict[bytes, dict[int, Block]] = {}
        # What the cache does, oldest first, as vLLM tells it (distributed/kv_events.py). Nobody is
        # told before somebody puts a list here.
        self.events: list[Event] | None = None

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def lookup(self, hash: bytes) -> Block | None:
        """The oldest block with this hash, owned or free; None if there is none."""
        blocks = self.cached.get(hash)
        return next(iter(blocks.values())) if blocks else None

    def take(self, count: int) -> list[Block]:
        """Hand out the `count` first free blocks. What they cached is evicted now, not earlier."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free")
        taken = [self.free_queue.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.hash is not None:
                self.tell(Removed(block.hash))
            self.unpublish(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Give cached blocks one more owner; those that were free leave the queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                del self.free_queue[block.block_id]
            block.ref_cnt += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Take one owner from each block, given in the order in which they should be evicted.

        Blocks without a hash can never be hit again: they go to the front of the queue and are
        used next. Blocks with a hash go to its end: least recently used is evicted first.
        """
        front = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.hash is None:
                    front.append(block)
                else:
                    self.free_queue[block.block_id] = block
        for block in reversed(front):
            self.free_queue[block.block_id] = block
            self.free_queue.move_to_end(block.block_id, last=False)

    def publish(self, block: Block, hash: bytes) -> None:
        """Let later requests find `block` under `hash`."""
        block.hash = hash
        self.cached.setdefault(hash, {})[block.block_id] = block

    def unpublish(self, block: Block) -> None:
        """Forget what `block` contains."""
        if block.hash is None:
            return
        same = self.cached[block.hash]
        del same[block.block_id]
        if not same:
            del self.cached[block.hash]
        block.hash = None

    def reset(self) -> bool:
        """Forget all cached content; False, and nothing happens, while a block is in use."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self.blocks:
            self.unpublish(block)
        self.tell(Cleared())
        return True

    def tell(self, event: Event) -> None:
        """Note what happened, if somebody wants to know."""
        if self.events is not None:
            self.events.append(event)


class KVCacheManager:
    """Block tables of all admitted requests over one pool: match, allocate, publish, release."""

    publishes_early = True

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token; got {block_size}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.caching = enable_caching
        self.pool = BlockPool(num_blocks, enable_caching)
        self.tables: dict[str, list[Block]] = {}
        self._num_published: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def reset(self) -> bool:
        """Forget all cached blocks; False, and nothing happens, while a request holds some."""
        return self.pool.reset()

    def key(self, token_ids: Sequence[int], salt: str | None, hashes: list[bytes]) -> list[bytes]:
        """`hashes`, with those of the blocks that became full since the last call."""
        if self.caching:
            extend_hashes(hashes, token_ids, self.block_size, salt)
        return hashes

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> list[Block]:
        """The longest run of cached blocks from the start of a request of `num_tokens` tokens.

        The last token is never taken from the cache, even if its block is there: the model has to
        run on at least one token to give logits. So a hit is num_tokens - 1 rounded down to blocks
        at most (`KVCacheManager.get_computed_blocks`). Nothing is reserved by looking: the caller
        allocates before anyone else can.
        """
        hits: list[Block] = []
        for hash in hashes[: (num_tokens - 1) // self.block_size]:
            block = self.pool.lookup(hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[Block] = (),
        must_fit: int = 0,
    ) -> bool:
        """Give the request slots for its first `num_tokens` tokens, `hits` (at admission) included.

        must_fit: refuse unless this many tokens would fit now, though fewer get slots. At
            admission it is the whole sequence, so that a long prompt does not start what it
            cannot finish (vLLM's `scheduler_reserve_full_isl`, on by default).
        Returns False, with nothing changed, if there are not enough free blocks.
        """
        table = self.tables.get(request_id, [])
        needed = self._num_blocks(num_tokens) - len(table) - len(hits)
        needed_to_fit = self._num_blocks(must_fit) - len(table) - len(hits)
        # A hit on a free block leaves the queue too, so it is no longer there to be handed out.
        revived = sum(block.ref_cnt == 0 for block in hits)
        if max(needed, needed_to_fit, 0) + revived > self.pool.num_free:
            return False
        self.pool.touch(hits)  # before `take`, which could evict them
        self.tables[request_id] = table
        table.extend(hits)
        table.extend(self.pool.take(max(needed, 0)))
        self._num_published.setdefault(request_id, len(hits))
        return True

    def publish(self, request_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Let others find the request's blocks that are full with its first `num_tokens` tokens."""
        if not self.caching:
            return
        table = self.tables[request_id]
        first, end = self._num_published[request_id], num_tokens // self.block_size
        for block, hash in zip(table[first:end], hashes[first:end], strict=True):
            self.pool.publish(block, hash)
        if first < end:
            self.pool.tell(Stored(tuple(hashes[first:end]), hashes[first - 1] if first else None))
        self._num_published[request_id] = max(first, end)

    def release(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the request's blocks, the last first: the tail of a sequence is evicted before its
        head, which more requests can share.

        Blocks beyond `num_computed_tokens` were published for a step that then did not compute
        them: they hold no KV and are unpublished.
        """
        table = self.tables.pop(request_id, [])
        self._num_published.pop(request_id, None)
        for block in table[num_computed_tokens // self.block_size :]:
            self.pool.unpublish(block)
        self.pool.free(table[::-1])

    def block_ids(self, request_id: str) -> list[int]:
        """The request's block table; empty if it holds no blocks."""
        return [block.block_id for block in self.tables.get(request_id, [])]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
