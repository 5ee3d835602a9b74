"""SGLang's own radix tree over its own pool of slots, driven without a model.

Run under SGLang's Python by `kvlab.engines.sglang_tree`. The classes are SGLang 0.5.23's, in
srt/mem_cache: unified_radix_cache.py (`UnifiedRadixCache`, with its tree in Python or in Rust),
radix_cache.py (`RadixCache`, the older one), allocator/ and memory_pool.py.
"""

from __future__ import annotations

import os
from array import array
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # no model runs here, on a machine with a GPU neither
from kvlab.inside import calls, sglang_cpu

sglang_cpu.install()

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def key(tokens: list[int], salt: str | None) -> RadixKey:
    return RadixKey(array("q", tokens), cache_salt=salt)


class Tree:
    """A tree and its pool."""

    def make(self, size: int, page_size: int, core: str, policy: str) -> None:
        """A new tree, empty, over `size` free slots. core: "python", "rust" or "old"."""
        if not (page_size >= 1 and size >= page_size and size % page_size == 0):
            raise ValueError(f"{size} slots are no whole number of pages of {page_size}")
        if core not in ("python", "rust", "old"):
            raise ValueError(f"there is no core {core!r}")
        kv = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=1,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        if page_size == 1:
            pool = TokenToKVPoolAllocator(size, torch.float32, "cpu", kv, need_sort=False)
        else:
            pool = PagedTokenToKVPoolAllocator(
                size, page_size, torch.float32, "cpu", kv, need_sort=False
            )
        params: dict[str, Any] = {
            "disable": False,
            "req_to_token_pool": ReqToTokenPool(
                size=1, max_context_len=size, device="cpu", enable_memory_saver=False
            ),
            "token_to_kv_pool_allocator": pool,
            "page_size": page_size,
            "eviction_policy": policy,
        }
        if core == "old":
            tree = RadixCache(CacheInitParams(**params))
        else:
            params |= {"tree_components": (ComponentType.FULL,), "tree_core_backend": core}
            tree = UnifiedRadixCache(CacheInitParams(**params))
        # All of it, or, where something was refused, what there was.
        self.page_size, self.pool, self.tree = page_size, pool, tree
        self.locks: dict[str, tuple[Any, Any]] = {}

    def _match(self, tokens: list[int], salt: str | None) -> tuple[int, Any]:
        found = self.tree.match_prefix(MatchPrefixParams(key=key(tokens, salt)))
        return found.device_prefix_len, found.last_device_node

    def match(self, tokens: list[int], salt: str | None) -> int:
        return self._match(tokens, salt)[0]

    def publish(self, tokens: list[int], salt: str | None, priority: int) -> int | None:
        """What a finished request does with the KV of its full pages; None: too few free slots."""
        if not isinstance(priority, int) or abs(priority) >= 1 << 63:
            raise ValueError(f"priority is a whole number, and not {priority!r}")
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        cached, node = self._match(whole, salt)
        new = self.pool.alloc(len(whole) - cached)
        if new is None:
            return None
        held = self.tree.path_device_indices(node)
        self.tree.insert(
            InsertParams(
                key=key(whole, salt),
                value=torch.cat([held, new]),
                prev_prefix_len=cached,
                priority=priority,
            )
        )
        return cached

    def lock(self, name: str, tokens: list[int], salt: str | None) -> int:
        if name in self.locks:
            raise ValueError(f"{name!r} holds a lock already: unlock it first")
        cached, node = self._match(tokens, salt)
        self.locks[name] = (node, self.tree.inc_lock_ref(node))
        return cached

    def unlock(self, name: str) -> None:
        if name not in self.locks:
            raise LookupError(f"{name!r} holds no lock")
        node, receipt = self.locks.pop(name)
        self.tree.dec_lock_ref(node, receipt.to_dec_params())

    def evict(self, count: int) -> int:
        return self.tree.evict(EvictParams(num_tokens=count)).num_tokens_evicted

    def reset(self) -> None:
        self.tree.reset()
        self.pool.clear()
        self.locks.clear()

    def sizes(self) -> dict[str, int]:
        return {
            "evictable": self.tree.evictable_size(),
            "protected": self.tree.protected_size(),
            "free": self.pool.available_size(),
        }


if __name__ == "__main__":
    calls.serve_object(Tree())
