"""HiCache's two copy kernels as torch indexing.

Indices are token slots, int64, one for each token. A page is page_size neighbouring tokens: the
slots of one start at a multiple of page_size and follow one another, so its first slot says where
it lies. Device buffers hold one layer each, [slots, heads, head_dim]; host buffers are page first,
[pages, layers, page_size, heads, head_dim].
"""

from __future__ import annotations

import torch


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of every layer from device to host (L1 to L2).

    src_ptrs: K of each layer, then V of each layer; dst_ptrs: [K, V] of the host. For
    sgl_kernel.kvcacheio's function of this name, sglang-kernel 0.4.10
    (python/sglang/kernels/aot/csrc/kvcacheio/transfer.cu).
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for i, src in enumerate(src_ptrs):
        dst = dst_ptrs[i // layers][:, i % layers]
        dst[pages] = src[src_indices].view(-1, *dst.shape[1:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer from host to device (L2 to L1).

    src_ptrs: [K, V] of the host; dst_ptrs: [K, V] of this layer. For sgl_kernel.kvcacheio's
    function of this name, as above.
    """
    pages = src_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *dst.shape[1:])
