"""vLLM's own KVCacheManager, to ask it what a pool of blocks does: which are hit, handed out,
evicted, in which order.

    from kvlab.engines import vllm_blocks

    with vllm_blocks.start(num_blocks=11, block_size=4) as manager:
        manager.add("a", list(range(14)))
        manager.allocate("a", 14)
        print(manager.table("a"), manager.free_queue(), manager.events())

No server and no model: the class is imported in vLLM's environment (`kvlab.inside.vllm_blocks`)
and told of requests as vLLM's scheduler would tell it. Block hashes are those of
prefix_caching_hash_algo="sha256_cbor".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.engines.worker import Worker


def start(num_blocks: int, block_size: int, *, deadline: float = 300) -> VLLMBlocks:
    """Start a process with a manager of so many blocks, of which block 0 is the null block."""
    return VLLMBlocks(num_blocks, block_size, deadline).start()


class VLLMBlocks(Worker):
    """A process that holds a KVCacheManager; `start` makes one."""

    name = "vLLM's KVCacheManager"
    _program = "vllm_blocks"
    _environment_name = "vllm"

    def __init__(self, num_blocks: int, block_size: int, deadline: float) -> None:
        super().__init__(f"with {num_blocks} blocks of {block_size}", deadline=deadline)
        self._shape = {"num_blocks": num_blocks, "block_size": block_size}

    def _begin(self) -> None:
        self.call("make", **self._shape)

    def make(self, num_blocks: int, block_size: int) -> None:
        """Begin anew, with another pool and no requests."""
        self.call("make", num_blocks=num_blocks, block_size=block_size)

    def add(self, name: str, tokens: Sequence[int], salt: str | None = None) -> None:
        """Tell it of a request that waits; its full blocks are hashed now."""
        self.call("add", name=name, tokens=list(tokens), salt=salt)

    def append(self, name: str, token: int) -> None:
        """Add a sampled token to a request."""
        self.call("append", name=name, token=token)

    def match(self, name: str) -> int:
        """Tokens of the request that are cached now; the last one never counts."""
        found: int = self.call("match", name=name)
        return found

    def allocate(self, name: str, count: int, *, must_fit: bool = False) -> bool:
        """Slots for the request's next `count` tokens, after what is cached if it has none yet.

        must_fit: refuse unless all its tokens would fit. False, and nothing changed, if they do
        not fit. The tokens count as computed from then on.
        """
        done: bool = self.call("allocate", name=name, count=count, must_fit=must_fit)
        return done

    def table(self, name: str) -> list[int]:
        """The request's blocks, in the order of its tokens."""
        ids: list[int] = self.call("table", name=name)
        return ids

    def free(self, name: str) -> None:
        """The request is done, aborted or preempted: its blocks lose an owner."""
        self.call("free", name=name)

    def reset(self) -> bool:
        """Forget all cached blocks; False while one is in use."""
        done: bool = self.call("reset")
        return done

    def free_queue(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        ids: list[int] = self.call("free_queue")
        return ids

    def usage(self) -> float:
        """Share of the blocks that requests own, from 0 to 1: its kv_cache_usage_perc."""
        share: float = self.call("usage")
        return share

    def events(self) -> list[dict[str, Any]]:
        """What was stored and removed since the last call, in order.

        {"stored": [hashes], "parent": hash or None, "tokens": [ids]}, {"removed": [hashes]} or
        {"cleared": True}; a hash is 32 bytes.
        """
        found: list[dict[str, Any]] = self.call("events")
        return found
