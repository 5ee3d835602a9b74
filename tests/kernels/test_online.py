"""The few lines that chapter and kernels follow: `minikv.attention.online`."""

import math

import pytest
import torch

from minikv.attention.online import attend, causal_mask, merge


def exact(q, k, v, mask):
    """The whole matrix at once; (output, lse)."""
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~mask, -math.inf)
    return scores.softmax(1) @ v, scores.logsumexp(1)


@pytest.mark.parametrize("queries, keys, block", [(1, 1, 1), (1, 40, 7), (9, 9, 4), (13, 64, 64)])
def test_one_pass_over_blocks_is_the_softmax(rng, queries, keys, block):
    q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (queries, keys, keys))
    q *= 30  # scores of some hundreds: exp() of them would overflow
    mask = causal_mask(queries, keys)
    out, lse = attend(q, k, v, block, mask)
    wanted, wanted_lse = exact(q, k, v, mask)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_the_mask_has_its_corner_at_the_bottom_right():
    """flash-attention since PR 436; torch's is_causal has it at the top left."""
    assert causal_mask(2, 5).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(5, 2).any(1).tolist() == [False, False, False, True, True]


def test_a_query_that_reads_nothing_gets_zeros(rng):
    q, k, v = torch.randn(5, 16), torch.randn(2, 16), torch.randn(2, 16)
    out, lse = attend(q, k, v, 1, causal_mask(5, 2))
    assert out[:3].eq(0).all() and lse[:3].eq(-math.inf).all()
    assert out.isfinite().all() and lse[3:].isfinite().all()


def test_parts_merge_to_the_whole(rng):
    q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (3, 50, 50))
    parts = [attend(q, k[a:b], v[a:b], 8) for a, b in ((0, 20), (20, 20), (20, 49), (49, 50))]
    out, lse = merge(*(torch.stack(column) for column in zip(*parts, strict=True)))
    wanted, wanted_lse = attend(q, k, v, 8)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)


def test_nothing_merges_to_nothing():
    out, lse = merge(torch.zeros(2, 1, 16), torch.full((2, 1), -math.inf))
    assert out.eq(0).all() and lse.eq(-math.inf).all()


def test_the_logarithm_is_the_natural_one():
    """flashinfer #2113: three keys and one, all scores 0, so the parts count 3/4 and 1/4. Their
    logarithms in base 2, taken for natural ones, make that 0.830 and 0.170."""
    values = torch.tensor([[1.0], [0.0]])
    q, k = torch.zeros(1, 1), torch.zeros(3, 1)
    parts = [attend(q, k, values[:1].expand(3, 1), 2), attend(q, k[:1], values[1:], 2)]
    outputs, lses = (torch.stack(column) for column in zip(*parts, strict=True))
    assert lses.flatten().tolist() == pytest.approx([math.log(3), 0])
    assert merge(outputs, lses)[0].item() == pytest.approx(0.75)
    assert merge(outputs, lses / math.log(2))[0].item() == pytest.approx(0.830, abs=5e-4)
