"""Both kernels against float64: fresh random inputs, shapes that fill no tile, a poisoned cache."""

import pytest
import torch
from paged_case import DEVICE, Case

from minikv.attention import Segment

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGES = (16, 32, 64, 128, 256, 24)
# Each group with both head sizes; pages and dtypes take turns.
SHAPES = [
    dict(group=group, head_dim=head_dim, page=PAGES[i % len(PAGES)], dtype=DTYPES[i % len(DTYPES)])
    for i, (head_dim, group) in enumerate((d, g) for d in (64, 128) for g in range(1, 9))
]


def name(shape):
    return f"group{shape['group']}-dim{shape['head_dim']}-page{shape['page']}"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a launch asks for holds NaN, not the zeros that it often has by chance."""
    monkeypatch.setattr(torch, "empty", lambda shape, **how: torch.full(shape, torch.nan, **how))


def prefill(kernels, case):
    segments = kernels.Segments.of(case.segments, case.page, DEVICE)
    kernels.flash_prefill(case.q, case.k, case.v, segments, case.out, case.lse)


def decode(kernels, case, num_splits=None):
    segments = kernels.Segments.of(case.segments, case.page, DEVICE)
    kernels.paged_decode(case.q, case.k, case.v, segments, case.out, case.lse, num_splits)


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_prefill(kernels, rng, shape):
    """A whole prompt, a chunk after a cached prefix, and a single token, side by side."""
    prefix = rng.randrange(1, 150)
    segments = [(0, rng.randrange(2, 70)), (prefix, prefix + rng.randrange(2, 50)), (0, 1)]
    case = Case(rng, segments, **shape)
    prefill(kernels, case)
    case.check()


@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_decode(kernels, rng, shape):
    lengths = [1, rng.randrange(2, 64), rng.randrange(65, 400)]
    case = Case(rng, [(n - 1, n) for n in lengths], **shape)
    decode(kernels, case, num_splits=rng.randrange(1, 8))
    case.check()


@pytest.mark.parametrize("length", [16, 63, 64, 65, 127, 128, 129, 192])
def test_ends_of_tiles_and_pages(kernels, rng, length):
    shape = dict(group=2, page=64, head_dim=64, dtype=torch.float32)
    case = Case(rng, [(length - 1, length)], **shape)
    decode(kernels, case, num_splits=3)
    case.check()
    case = Case(rng, [(max(0, length - 65), length)], **shape)
    prefill(kernels, case)
    case.check()


def test_a_few_thousand_keys(kernels, rng):
    shape = dict(group=4, page=16, head_dim=128, dtype=torch.bfloat16, kv_heads=1)
    length = rng.randrange(2500, 3500)
    case = Case(rng, [(length - 37, length)], **shape)
    prefill(kernels, case)
    case.check()
    case = Case(rng, [(length - 1, length), (0, 1)], **shape)
    decode(kernels, case)
    case.check()


def test_large_scores(kernels, rng):
    """exp() of these overflows float32, so the largest must be taken off first."""
    case = Case(rng, [(0, 100)], group=2, page=16, head_dim=64, dtype=torch.float32)
    case.q *= 50
    prefill(kernels, case)
    out, lse = case.expected()
    assert lse[1:-1].max() > 100
    torch.testing.assert_close(case.out.double(), out, rtol=0, atol=2e-3, equal_nan=True)


def test_more_queries_than_keys(kernels, rng):
    """Queries before position 0 read nothing: zeros, and a log-sum-exp of -inf."""
    case = Case(rng, [(-3, 2)], group=1, page=16, head_dim=64, dtype=torch.float32, kv_heads=1)
    prefill(kernels, case)
    case.check()
    assert case.lse[1:6, 0].isinf().tolist() == [True, True, True, False, False]


def test_the_keys_end_with_the_chunk(kernels, rng):
    """nano-vllm #212: the third chunk of 256 tokens of a prompt of 1,000 reads 768 keys. The blocks
    of the whole prompt are there, and behind the chunk nothing is written yet."""
    case = Case(rng, [(512, 768)], group=1, page=16, head_dim=64, dtype=torch.float32, kv_heads=1)
    ((row, chunk),) = case.segments
    unwritten = [i for i in range(1, len(case.k)) if i not in chunk.block_ids]
    longer = Segment(chunk.start, chunk.end, [*chunk.block_ids, *unwritten])
    case.segments = [(row, longer)]
    prefill(kernels, case)
    case.segments = [(row, chunk)]
    case.check()


def test_splits_do_not_change_the_result(kernels, rng):
    shape = dict(group=3, page=32, head_dim=64, dtype=torch.float32, kv_heads=1)
    case = Case(rng, [(299, 300), (4, 5)], **shape)
    for num_splits in (1, 2, 5, 17):
        case.out.fill_(torch.nan), case.lse.fill_(torch.nan)
        decode(kernels, case, num_splits)
        case.check()


def test_how_many_splits(kernels):
    """Enough programs for two on each multiprocessor, no part under 256 keys, 64 at most."""
    assert kernels.choose_splits(programs=8, max_keys=100_000, multiprocessors=132) == 33
    assert kernels.choose_splits(programs=8, max_keys=1000, multiprocessors=132) == 4
    assert kernels.choose_splits(programs=1, max_keys=100_000, multiprocessors=132) == 64
    assert kernels.choose_splits(programs=2048, max_keys=100_000, multiprocessors=132) == 1


def test_what_they_do_not_do_is_said(kernels, rng):
    case = Case(rng, [(3, 5)], group=2, page=16, head_dim=64, dtype=torch.float32)
    with pytest.raises(ValueError, match="use flash_prefill"):
        decode(kernels, case)
    q, k, v, out, lse = case.q, case.k, case.v, case.out, case.lse
    segments = kernels.Segments.of(case.segments, 16, DEVICE)
    with pytest.raises(ValueError, match="power of two"):
        kernels.flash_prefill(q[..., :48], k[..., :48], v[..., :48], segments, out, lse)
    with pytest.raises(ValueError, match="cannot share"):
        kernels.flash_prefill(q[:, :3], k, v, segments, out, lse)
    with pytest.raises(ValueError, match="the same"):
        kernels.flash_prefill(q.half(), k, v, segments, out, lse)
    with pytest.raises(ValueError, match="the same"):
        kernels.flash_prefill(*(x.double() for x in (q, k, v)), segments, out.double(), lse)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.flash_prefill(q.mT.contiguous().mT, k, v, segments, out, lse)
