"""How fast are minikv's attention kernels on this GPU, and how fast could they be?

    PYTHONPATH=shared python3 -m kvlab.kernel_speed

runs where `make test-gpu` runs, and writes results/kernels-DEVICE.json.

A prefill is held against the rate of a large matrix product that was measured on the same GPU, a
decode against the bandwidth of a large copy: the one computes, the other reads. Beside each stands
torch's scaled_dot_product_attention on the same keys and values in one contiguous piece, without
blocks: what a paged kernel gives up, if it gives up anything. Outputs are compared before they are
timed. Times are medians of Triton's do_bench, which empties the L2 cache before each run.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.attention import Segment

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16  # as in Llama 3.1 8B
DTYPE, DEVICE = torch.bfloat16, "cuda"
PREFILLS = [(0, 512), (0, 2048), (0, 8192), (8192, 8704)]
"""(start, end) of one request: whole prompts, and a chunk after a cached prefix."""
DECODES = [(1, 1024), (1, 32768), (16, 1024), (16, 8192), (128, 1024), (128, 4096)]
"""(requests, keys of each)."""


def prefill_operations(start: int, end: int) -> int:
    """Floating-point operations of one layer's attention: for each query and each key that it
    reads, a product with the key and one with the value, of two operations for each dimension."""
    pairs = (end - start) * (start + end + 1) // 2  # query at position p reads p + 1 keys
    return 4 * HEADS * HEAD_DIM * pairs


def decode_bytes(requests: int, keys: int) -> int:
    """Bytes that one layer's attention has to read: keys and values, once for each KV head."""
    return 2 * requests * keys * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


def ceilings() -> dict[str, float]:
    """What this GPU does at its best: a copy's bytes and a matrix product's operations a second."""
    here = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    there = torch.empty_like(here)
    n = 8192
    a, b = (torch.randn(n, n, dtype=DTYPE, device=DEVICE) for _ in range(2))
    return {
        "copy_bytes_per_second": 2 * here.numel() / milliseconds(lambda: there.copy_(here)) * 1e3,
        "matrix_operations_per_second": 2 * n**3 / milliseconds(lambda: a @ b) * 1e3,
    }


def _cache(requests: int, end: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Block tables in random order, and keys and values [blocks, BLOCK, KV_HEADS, HEAD_DIM]."""
    each = -(-end // BLOCK)
    ids = (torch.randperm(requests * each) + 1).view(requests, each).tolist()
    shape = (requests * each + 1, BLOCK, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2))
    return ids, k, v


def _contiguous(x: Tensor, tables: Sequence[Sequence[int]], end: int) -> Tensor:
    """[requests, KV_HEADS, end, HEAD_DIM]."""
    return x[torch.tensor(tables)].flatten(1, 2)[:, :end].transpose(1, 2).contiguous()


def measure(start: int, end: int, requests: int) -> tuple[float, float]:
    """Milliseconds of minikv's kernel and of torch, for requests that compute tokens
    start .. end - 1 each. Raises ValueError where their outputs differ."""
    from torch.nn.attention.bias import causal_lower_right

    from minikv.attention import kernels

    n = end - start
    tables, k, v = _cache(requests, end)
    placed = [(i * n, Segment(start, end, table)) for i, table in enumerate(tables)]
    segments = kernels.Segments.of(placed, BLOCK, k.device)
    q = torch.randn(requests * n, HEADS, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=DEVICE)
    kernel = kernels.paged_decode if n == 1 else kernels.flash_prefill

    theirs = q.view(requests, n, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    keys, values = _contiguous(k, tables, end), _contiguous(v, tables, end)
    mask = None if n == 1 or start == 0 else causal_lower_right(n, end)

    def torch_attention() -> Tensor:
        return F.scaled_dot_product_attention(
            theirs, keys, values, mask, is_causal=n > 1 and start == 0, enable_gqa=True
        )

    kernel(q, k, v, segments, out, lse)
    difference = (torch_attention().transpose(1, 2).reshape(q.shape) - out).abs().max().item()
    if not difference < 3e-2:
        raise ValueError(
            f"minikv's output is {difference:.2g} from torch's for tokens {start} to {end}: no "
            "time counts before `make test-gpu` passes"
        )
    mine = milliseconds(lambda: kernel(q, k, v, segments, out, lse))
    return mine, milliseconds(torch_attention)


def main() -> int:
    if not torch.cuda.is_available():
        print("Kernels are timed on a GPU, and torch finds none.", file=sys.stderr)
        return 1
    import triton

    values: dict[str, Any] = dict(ceilings())
    rows = []
    for start, end in PREFILLS:
        mine, theirs = measure(start, end, 1)
        rate = prefill_operations(start, end) / mine * 1e3
        share = rate / values["matrix_operations_per_second"]
        rows.append(dict(kernel="prefill", start=start, end=end, requests=1))
        rows[-1] |= dict(milliseconds=mine, torch_milliseconds=theirs, share_of_matrix_rate=share)
        print(rows[-1], flush=True)
    for requests, keys in DECODES:
        mine, theirs = measure(keys - 1, keys, requests)
        rate = decode_bytes(requests, keys) / mine * 1e3
        share = rate / values["copy_bytes_per_second"]
        rows.append(dict(kernel="decode", start=keys - 1, end=keys, requests=requests))
        rows[-1] |= dict(milliseconds=mine, torch_milliseconds=theirs, share_of_copy_rate=share)
        print(rows[-1], flush=True)
    values["kernels"] = rows

    gpu = torch.cuda.get_device_name()
    result = {
        "what": "minikv's attention kernels, beside torch's and what the GPU can do",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "host": {"gpu": gpu, "system": f"{platform.system()} {platform.machine()}"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "conditions": {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "block_size": BLOCK,
            "dtype": str(DTYPE).removeprefix("torch."),
        },
        "values": values,
    }
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    path = Path(__file__).parents[2] / "results" / f"kernels-{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
