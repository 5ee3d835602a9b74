"""How does a GPU read keys and values through block tables, without a copy of them?

Two kernels in Triton, both around the loop of `online.py`:

    flash_prefill  many queries of a request: one program for each tile of queries and each KV head
    paged_decode   one query of a request: so few rows that the keys are split among programs, whose
                   results a second kernel merges by their log-sum-exp

The query heads that share a KV head are rows of one tile: row r of a request is its query
r // group, head r % group. A key is then read once for the whole group, and the tensor cores, which
want 16 rows or more, have work even in a decode.

Two masks, and they are not the same. The length mask ends at the last key that is written: the end
of this chunk, not of the prompt. What lies behind it in a block is another request's, or nothing:
it is not loaded at all (0 * NaN would be NaN). The causal mask ends each query at its own position,
counted from the end: query i of n over m keys reads keys 0 .. m - n + i.

Inside, scores are in powers of two, as the hardware's exponential is; the log-sum-exp that comes
out is the natural one.

The same source runs without a GPU in Triton's interpreter: set TRITON_INTERPRET=1 before this file
is imported. The interpreter computes with numpy, which has no bfloat16, so there keys, values and
queries are widened to float32 first.

Source for the shape of it: T. Dao et al., "Flash-Decoding for long-context inference", 2023; the
tutorial "Fused attention" of Triton 3.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from minikv.attention.paged import KVCache, Segment

INTERPRETED: bool = knobs.runtime.interpret
"""Whether the kernels of this process run in Triton's interpreter, on the CPU."""

LN_2 = tl.constexpr(math.log(2))
LOG2_E = tl.constexpr(1 / math.log(2))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _read_keys(
    q, positions, first, last, table, k_ptr, v_ptr, kv_head, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A tile of queries reads keys first .. last - 1, `KEYS` at a time.

    q [ROWS, HEAD_DIM]; positions [ROWS]: the last key that each row may read. Returns the output
    float32 [ROWS, HEAD_DIM] and its log-sum-exp float32 [ROWS], natural logarithm.
    """
    m = tl.full([ROWS], -float("inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741 (its name in the papers)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    dims = tl.arange(0, HEAD_DIM)
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        written = keys < last
        block = tl.load(table + keys // PAGE, mask=written, other=0).to(tl.int64)
        slot = block * PAGE + keys % PAGE
        at = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + at, mask=written[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=written[:, None], other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        # "ieee": float32 inputs are not rounded to the tensor cores' 19 bits.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        causal = keys[None, :] <= positions[:, None]
        scores = tl.where(written[None, :] & causal, scores, -float("inf"))
        larger = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # a row that has read nothing
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(weights, 1)  # noqa: E741
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        m = larger
    read_any = l > 0
    out = acc / tl.where(read_any, l, 1.0)[:, None]
    lse = tl.where(read_any, (m + tl.log2(tl.where(read_any, l, 1.0))) * LN_2, -float("inf"))
    return out, lse


@triton.jit(do_not_specialize=["table_width"])
def _prefill(
    q_ptr, k_ptr, v_ptr, tables, row_starts, key_starts, key_ends, out_ptr, lse_ptr, scale,
    table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of the longest segment, KV heads, segments)."""
    tile, kv_head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    start, end = tl.load(key_starts + segment), tl.load(key_ends + segment)
    num_rows = (end - start) * GROUP
    if tile * ROWS >= num_rows:  # a shorter segment than the longest
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    token = (tl.load(row_starts + segment) + query).to(tl.int64)
    at = (token * HEADS + head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + at, mask=(row < num_rows)[:, None], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    # Keys behind the tile's last query are read by none of its rows.
    last_query = (tl.minimum((tile + 1) * ROWS, num_rows) - 1) // GROUP
    out, lse = _read_keys(
        q, start + query, 0, start + last_query + 1, tables + segment * table_width,
        k_ptr, v_ptr, kv_head, scale, KV_HEADS, HEAD_DIM, PAGE, ROWS, KEYS, WIDEN,
    )  # fmt: skip
    tl.store(out_ptr + at, out, mask=(row < num_rows)[:, None])
    tl.store(lse_ptr + token * HEADS + head, lse, mask=row < num_rows)


@triton.jit(do_not_specialize=["table_width", "num_splits"])
def _decode(
    q_ptr, k_ptr, v_ptr, tables, row_starts, key_ends, parts_ptr, lses_ptr, scale,
    table_width, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, KV heads, segments). Parts and their lses: float32 [segments, heads, splits,
    head_dim] and [segments, heads, splits]."""
    split, kv_head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    head, used = kv_head * GROUP + row, row < GROUP
    dims = tl.arange(0, HEAD_DIM)
    token = tl.load(row_starts + segment).to(tl.int64)
    at = (token * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=used[:, None], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    # Whole tiles for each split; a short request leaves the last splits without any.
    end = tl.load(key_ends + segment)
    share = tl.cdiv(tl.cdiv(end, num_splits), KEYS) * KEYS
    first = split * share
    last = tl.minimum(first + share, end)
    positions = tl.zeros([ROWS], tl.int32) + (end - 1)
    out, lse = _read_keys(
        q, positions, first, last, tables + segment * table_width,
        k_ptr, v_ptr, kv_head, scale, KV_HEADS, HEAD_DIM, PAGE, ROWS, KEYS, WIDEN,
    )  # fmt: skip
    part = (segment * HEADS + head).to(tl.int64) * num_splits + split
    tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], out, mask=used[:, None])
    tl.store(lses_ptr + part, lse, mask=used)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    parts_ptr, lses_ptr, row_starts, out_ptr, lse_ptr, num_splits,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, segments). `online.merge` for one row; SPLITS is num_splits or more, and a
    power of two."""
    head, segment = tl.program_id(0), tl.program_id(1)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    there = split < num_splits
    part = (segment * HEADS + head).to(tl.int64) * num_splits + split
    lses = tl.load(lses_ptr + part, mask=there, other=-float("inf"))
    parts = tl.load(
        parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=there[:, None], other=0.0
    )
    largest = tl.max(lses, 0)  # finite: a decode reads its own key at least
    shares = tl.exp(lses - largest)
    total = tl.sum(shares, 0)
    token = tl.load(row_starts + segment).to(tl.int64)
    out = tl.sum(parts * shares[:, None], 0) / total
    tl.store(out_ptr + (token * HEADS + head) * HEAD_DIM + dims, out)
    tl.store(lse_ptr + token * HEADS + head, largest + tl.log(total))


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a batch as the kernels read them: int32 tensors on the device."""

    row_starts: Tensor
    """[n]: row of q that holds a segment's first query"""
    key_starts: Tensor
    """[n]: position of that query"""
    key_ends: Tensor
    """[n]: one past the last key that is written; the position of the last query is one less"""
    tables: Tensor
    """[n, width]: block ids, filled up with 0"""
    max_queries: int
    max_keys: int

    @classmethod
    def of(
        cls, segments: Sequence[tuple[int, Segment]], block_size: int, device: torch.device
    ) -> Segments:
        """segments: with each the row of q that holds its first query; at least one."""

        def tensor(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        tables = [list(s.block_ids[: -(-s.end // block_size)]) for _, s in segments]
        width = max(map(len, tables))
        return cls(
            row_starts=tensor([row for row, _ in segments]),
            key_starts=tensor([s.start for _, s in segments]),
            key_ends=tensor([s.end for _, s in segments]),
            tables=tensor([table + [0] * (width - len(table)) for table in tables]),
            max_queries=max(s.end - s.start for _, s in segments),
            max_keys=max(s.end for _, s in segments),
        )


def flash_prefill(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, out: Tensor, lse: Tensor
) -> None:
    """Let all queries of the segments read; writes their rows of `out` and `lse`, and no others.

    q, out [T, heads, head_dim]; k, v [num_blocks, block_size, kv_heads, head_dim], one layer of the
    KV cache, the segments' own keys and values already in it; lse float32 [T, heads], natural
    logarithm. Raises ValueError for what the kernels do not do.
    """
    sizes = _sizes(q, k, v, out, lse)
    group = sizes["HEADS"] // sizes["KV_HEADS"]
    options = prefill_options(q.dtype, q.shape[2])
    tiles = triton.cdiv(segments.max_queries * group, options["ROWS"])
    _prefill[tiles, sizes["KV_HEADS"], len(segments.key_ends)](
        q, k, v, segments.tables, segments.row_starts, segments.key_starts, segments.key_ends,
        out, lse, q.shape[2] ** -0.5, segments.tables.shape[1],
        **sizes, **options,
    )  # fmt: skip


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    out: Tensor,
    lse: Tensor,
    num_splits: int | None = None,
) -> None:
    """The same for segments of one query each; num_splits: into how many parts the keys of each
    are split, by default as many as keep the GPU busy."""
    if segments.max_queries != 1:
        raise ValueError(f"a decode has one query, not {segments.max_queries}: use flash_prefill")
    sizes = _sizes(q, k, v, out, lse)
    heads, kv_heads = sizes["HEADS"], sizes["KV_HEADS"]
    n = len(segments.key_ends)
    if num_splits is None:
        cores = 1 if INTERPRETED else _multiprocessors(q.device)
        num_splits = choose_splits(n * kv_heads, segments.max_keys, cores)
    parts = torch.empty((n, heads, num_splits, q.shape[2]), dtype=torch.float32, device=q.device)
    lses = torch.empty((n, heads, num_splits), dtype=torch.float32, device=q.device)
    _decode[num_splits, kv_heads, n](
        q, k, v, segments.tables, segments.row_starts, segments.key_ends, parts, lses,
        q.shape[2] ** -0.5, segments.tables.shape[1], num_splits,
        **sizes, **decode_options(q.dtype, heads // kv_heads),
    )  # fmt: skip
    _merge[heads, n](
        parts, lses, segments.row_starts, out, lse, num_splits,
        HEADS=heads, HEAD_DIM=q.shape[2], SPLITS=triton.next_power_of_2(num_splits), num_warps=4,
    )  # fmt: skip


def prefill_options(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Tile of `_prefill`, and how Triton is to compile it."""
    if dtype == torch.float32 and not INTERPRETED:
        # Exact, so without tensor cores: all operands lie in registers.
        return dict(ROWS=32, KEYS=16, num_warps=8, num_stages=2)
    return dict(ROWS=128, KEYS=64, num_warps=8 if head_dim > 64 else 4, num_stages=2)


def decode_options(dtype: torch.dtype, group: int) -> dict[str, int]:
    """The same for `_decode`, whose rows are the `group` query heads of a KV head."""
    rows = max(16, triton.next_power_of_2(group))  # 16: the least that a tensor core takes
    if dtype == torch.float32 and not INTERPRETED:
        return dict(ROWS=rows, KEYS=32, num_warps=8, num_stages=3)
    return dict(ROWS=rows, KEYS=64, num_warps=4, num_stages=3)


def choose_splits(programs: int, max_keys: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys of each decode: two programs for each multiprocessor,
    but no part under 256 keys, whose merge would cost more than it saves, and no more than 64."""
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, -(-max_keys // 256), 64))


class TritonBatch:
    """`PagedBatch` with these kernels: attention for one step over the KV cache.

    segments: in the order of the rows, as there. Those of one query are decodes, in a mixed batch
    too; a layer costs three launches at most, however many requests there are.
    """

    copied_bytes = 0
    """The kernels read where the blocks lie."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        device, size = cache.k[0].device, cache.block_size
        self.cache = cache
        self.positions = torch.cat([torch.arange(s.start, s.end) for s in segments]).to(device)
        slots, row = [], 0  # slots of the tokens whose keys and values come in this step
        decodes: list[tuple[int, Segment]] = []
        prefills: list[tuple[int, Segment]] = []
        for s in segments:
            positions = torch.arange(s.start, s.end)
            slots.append(torch.tensor(s.block_ids)[positions // size] * size + positions % size)
            (decodes if s.end - s.start == 1 else prefills).append((row, s))
            row += s.end - s.start
        self.writes = torch.cat(slots).to(device)
        self.decodes = Segments.of(decodes, size, device) if decodes else None
        self.prefills = Segments.of(prefills, size, device) if prefills else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys.flatten(0, 1)[self.writes] = k
        values.flatten(0, 1)[self.writes] = v
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if self.prefills:
            flash_prefill(q, keys, values, self.prefills, out, lse)
        if self.decodes:
            paged_decode(q, keys, values, self.decodes, out, lse)
        return out


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _sizes(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> dict[str, int | bool]:
    """What the kernels are compiled for; ValueError for what they cannot do."""
    heads, head_dim = q.shape[1:]
    _, page, kv_heads, _ = k.shape
    if not INTERPRETED and q.device.type != "cuda":
        raise ValueError(
            f"these kernels run on a GPU, and q lies on {q.device}: set TRITON_INTERPRET=1 before "
            "minikv.attention.kernels is imported, and Triton interprets them"
        )
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim must be a power of two, 16 or more, not {head_dim}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if not q.dtype == k.dtype == v.dtype == out.dtype or q.dtype not in DTYPES:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}, out {out.dtype}: must be one of "
                         "bfloat16, float16 and float32, and the same")  # fmt: skip
    if not all(x.is_contiguous() for x in (q, k, v, out, lse)):
        raise ValueError("q, k, v, out and lse must be contiguous")
    return dict(HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PAGE=page, WIDEN=INTERPRETED)
