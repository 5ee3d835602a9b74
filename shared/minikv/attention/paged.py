"""How does a batch read keys and values that lie scattered in blocks?

The KV cache is two tensors for each layer, K and V, both

    [num_blocks, block_size, num_kv_heads, head_dim]

so a block is contiguous, and token i of a request lies at
[block_table[i // block_size], i % block_size]. Seen flat, as [num_blocks * block_size, ...], that
row is its *slot*.

A layer first writes the keys and values of all rows of the batch into their slots, then lets each
request's queries read. In this order a request may read what another computes in the same pass.

Reading here is a gather: the request's blocks are copied, whole, into one contiguous piece, and
dense attention runs on it. That is what paging costs without a kernel of its own: an extra copy of
all KV that is read (`copied_bytes`). A paged kernel follows the block table instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.model import ModelConfig


class KVCache:
    """The memory. Block 0, the null block, is never written.

    k, v: one tensor for each layer, [num_blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.block_size = block_size
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows of the batch: tokens start .. end - 1, keys and values in `block_ids`."""

    start: int
    end: int
    block_ids: Sequence[int]


class PagedBatch:
    """Attention for one step over the KV cache. Made once a step, called once a layer.

    segments: in the order of the rows; the rows of segment i follow those of segment i - 1.
    positions: int64 [T], of each row in its request.
    writes: int64 [T], the slot of each row.
    tables: for each segment, int64, the blocks that hold its tokens 0 .. end - 1.
    copied_bytes: of keys and values, copied so far to read them.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        device, size = cache.k[0].device, cache.block_size
        self.cache = cache
        self.lengths = [s.end - s.start for s in segments]
        rows = [(s, i) for s in segments for i in range(s.start, s.end)]
        self.positions = torch.tensor([i for _, i in rows], device=device)
        self.writes = torch.tensor(
            [s.block_ids[i // size] * size + i % size for s, i in rows], device=device
        )
        self.ends = [s.end for s in segments]
        self.tables = [
            torch.tensor(s.block_ids[: -(-s.end // size)], device=device) for s in segments
        ]
        self.masks = [_causal_mask(s, device) for s in segments]
        self.copied_bytes = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        k_blocks, v_blocks = self.cache.k[layer], self.cache.v[layer]
        k_blocks.flatten(0, 1).index_copy_(0, self.writes, k)
        v_blocks.flatten(0, 1).index_copy_(0, self.writes, v)
        out = []
        for rows, table, end, mask in zip(
            q.split(self.lengths), self.tables, self.ends, self.masks, strict=True
        ):
            keys, values = k_blocks.index_select(0, table), v_blocks.index_select(0, table)
            self.copied_bytes += keys.nbytes + values.nbytes
            # The last block may be full of what nobody has written yet: cut it off.
            out.append(attend(rows, keys.flatten(0, 1)[:end], values.flatten(0, 1)[:end], mask))
        return torch.cat(out)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Queries of one request over its keys and values.

    q [n, heads, head_dim]; k, v [m, kv_heads, head_dim]; mask bool [n, m], None: all are read.
    The query heads that share a key head are laid out as more queries of it, so each key and value
    is read once and not once for each query head.
    """
    n, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if mask is not None:
        mask = mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3).reshape(n, heads, head_dim)


def _causal_mask(s: Segment, device: torch.device) -> Tensor | None:
    """bool [end - start, end]: token i reads tokens 0 .. i. One token alone reads them all."""
    if s.end - s.start == 1:
        return None
    rows, columns = torch.arange(s.start, s.end), torch.arange(s.end)
    return (columns <= rows[:, None]).to(device)
