"""Sizes as in use; too many for an interpreter."""

import pytest
import torch
from paged_case import DEVICE, Case

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_of_thousands(kernels, rng, group, head_dim, dtype):
    shape = dict(group=group, head_dim=head_dim, dtype=dtype, page=rng.choice([16, 64, 256]))
    prefix = rng.randrange(1, 3000)
    segments = [(0, rng.randrange(1000, 3000)), (prefix, prefix + rng.randrange(2, 900)), (0, 1)]
    case = Case(rng, segments, **shape)
    table = kernels.Segments.of(case.segments, case.page, DEVICE)
    kernels.flash_prefill(case.q, case.k, case.v, table, case.out, case.lse)
    case.check()


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("requests", [1, 40])
def test_decodes_of_thousands(kernels, rng, group, head_dim, dtype, requests):
    shape = dict(group=group, head_dim=head_dim, dtype=dtype, page=rng.choice([16, 64, 256]))
    lengths = [rng.randrange(1, 5000) for _ in range(requests)]
    case = Case(rng, [(n - 1, n) for n in lengths], **shape)
    table = kernels.Segments.of(case.segments, case.page, DEVICE)
    kernels.paged_decode(case.q, case.k, case.v, table, case.out, case.lse)
    case.check()


def test_a_cache_of_more_elements_than_an_int32_counts(kernels, rng):
    """Its last blocks lie beyond 2**31 elements: an index that wraps reads elsewhere."""
    shape = dict(group=4, head_dim=128, dtype=torch.bfloat16, page=16)
    case = Case(rng, [(199, 200)], **shape)
    per_block = case.k[0].numel()
    num_blocks = 2**31 // per_block + 2 * len(case.k)
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * num_blocks * per_block * 2 + 2**30:
        pytest.skip("10 GB of free GPU memory are needed")
    ((row, segment),) = case.segments
    far = [num_blocks - 1 - i for i in segment.block_ids]
    for name in ("k", "v"):
        near = getattr(case, name)
        large = near.new_full((num_blocks, *near.shape[1:]), torch.nan)
        large[far] = near[segment.block_ids]
        setattr(case, name, large)
    case.segments = [(row, type(segment)(segment.start, segment.end, far))]
    table = kernels.Segments.of(case.segments, case.page, DEVICE)
    kernels.paged_decode(case.q, case.k, case.v, table, case.out, case.lse)
    case.check()
