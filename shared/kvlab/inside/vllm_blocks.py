"""vLLM's own KVCacheManager, driven without a model: requests are told to it, blocks come back.

Run under vLLM's Python by `kvlab.engines.vllm_blocks`. The classes are vLLM 0.32.0's:
v1/core/kv_cache_manager.py (`KVCacheManager`), v1/core/block_pool.py (`BlockPool`),
v1/request.py (`Request`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvlab.inside import calls


class Blocks:
    """One manager and the requests that it was told of."""

    def make(self, num_blocks: int, block_size: int) -> None:
        """A new manager, its pool empty; block 0 is the null block."""
        _whole(num_blocks, "num_blocks", 2)
        _whole(block_size, "block_size", 1)
        init_none_hash(sha256_cbor)
        attention = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.hasher = get_request_block_hasher(block_size, sha256_cbor)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
            ),
            max_model_len=num_blocks * block_size,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.requests: dict[str, Request] = {}

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        if name in self.requests:
            raise ValueError(f"there is a request {name!r} already: free it first")
        for token in tokens:
            _whole(token, "a token", 0)
        self.requests[name] = Request(
            name,
            tokens,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )

    def append(self, name: str, token: int) -> None:
        _whole(token, "a token", 0)
        self._known(name).append_output_token_ids(token)

    def match(self, name: str) -> int:
        return self.manager.get_computed_blocks(self._known(name))[1]

    def allocate(self, name: str, count: int, must_fit: bool) -> bool:
        request = self._known(name)
        _whole(count, "count", 1)
        hits, hit_tokens = None, 0
        if request.num_computed_tokens == 0:
            hits, hit_tokens, _ = self.manager.get_computed_blocks(request)
        left = request.num_tokens - request.num_computed_tokens - hit_tokens
        if count > left:
            raise ValueError(f"{name!r} has {left} tokens left to compute, not {count}")
        new = self.manager.allocate_slots(
            request, count, hit_tokens, hits, full_sequence_must_fit=must_fit
        )
        if new is None:
            return False
        request.num_computed_tokens += hit_tokens + count
        return True

    def table(self, name: str) -> list[int]:
        ids: list[int] = self.manager.get_block_ids(self._known(name).request_id)[0]
        return ids

    def free(self, name: str) -> None:
        self.manager.free(self._known(name))
        del self.requests[name]

    def _known(self, name: str) -> Request:
        if name not in self.requests:
            raise LookupError(f"there is no request {name!r}: add it first")
        return self.requests[name]

    def reset(self) -> bool:
        done: bool = self.manager.reset_prefix_cache()
        return done

    def free_queue(self) -> list[int]:
        queue = self.manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]

    def usage(self) -> float:
        share: float = self.manager.usage
        return share

    def events(self) -> list[dict[str, Any]]:
        return [told(event) for event in self.manager.take_events()]


def _whole(value: Any, what: str, least: int) -> None:
    """Raise ValueError unless it is a whole number, not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is a whole number from {least} on, and not {value!r}")


def told(event: Any) -> dict[str, Any]:
    match event:
        case BlockStored():
            return {
                "stored": event.block_hashes,
                "parent": event.parent_block_hash,
                "tokens": event.token_ids,
            }
        case BlockRemoved():
            return {"removed": event.block_hashes}
        case AllBlocksCleared():
            return {"cleared": True}
    raise TypeError(f"an event of a kind that vLLM 0.32.0 did not have: {event!r}")


if __name__ == "__main__":
    import os

    # Else hashes leave it as whole numbers of 64 bits.
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    calls.serve_object(Blocks())
