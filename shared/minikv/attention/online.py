"""How is attention computed without ever holding all scores?

The softmax of a row divides by the sum over all its keys, so it seems to need them all at once.
It does not: read the keys in blocks and keep three things for each query,

    m    the largest score so far
    l    sum of exp(score - m) over the keys so far
    acc  sum of exp(score - m) * v over the keys so far

When a block brings a larger score, both sums are shrunk by exp(old m - new m) and go on. After the
last block the output is acc / l. That is FlashAttention's loop; `kernels.py` is this one in tiles.

What is left of a row is its output and lse = m + log(l), the logarithm of its sum of exp(score).
The two are enough to join results over different keys: `merge`. The logarithm is the natural one
here and everywhere in minikv. A kernel that counts in powers of two has log2 of that sum, smaller
numbers by a factor of ln 2 - and a merge of the other kind makes no error that a glance would see.

Algorithm: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018
(arXiv 1805.02867); T. Dao, "FlashAttention-2", 2023 (arXiv 2307.08691).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int) -> Tensor:
    """bool [num_queries, num_keys]: which keys a query reads.

    The last query reads all keys, the one before it all but one: the mask's corner is at the bottom
    right. With a cached prefix there are fewer queries than keys, and only this corner is right.
    """
    first = num_keys - num_queries  # the first query's own position
    return torch.arange(num_keys) <= first + torch.arange(num_queries)[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, block: int, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One head: what each query reads, in one pass over the keys, `block` of them at a time.

    q [n, head_dim]; k, v [keys, head_dim]; mask bool [n, keys], None: all are read.
    Returns the output [n, head_dim] and its lse [n], natural logarithm. A query that reads no key
    gets zeros and -inf.
    """
    m = q.new_full((len(q),), -math.inf)
    l = q.new_zeros(len(q))  # noqa: E741 (its name in the papers)
    acc = torch.zeros_like(q)
    for first in range(0, len(k), block):
        keys = slice(first, first + block)
        scores = q @ k[keys].T / math.sqrt(q.shape[1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, keys], -math.inf)
        larger = torch.maximum(m, scores.amax(1))
        # While a row has read nothing, both are -inf, and their difference would be NaN.
        base = larger.masked_fill(larger == -math.inf, 0)
        weights = torch.exp(scores - base[:, None])
        shrink = torch.exp(m - base)
        l = l * shrink + weights.sum(1)  # noqa: E741
        acc = acc * shrink[:, None] + weights @ v[keys]
        m = larger
    return acc / l.clamp(min=1e-30)[:, None], m + l.log()


def merge(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join what the same queries read from different keys, in parts.

    outputs [parts, n, head_dim], lses [parts, n] (natural logarithm) -> output [n, head_dim] and
    lse [n] over all keys. Each part counts by its share of the sum of exp(score).
    """
    lse = lses.logsumexp(0)
    base = lse.masked_fill(lse == -math.inf, 0)
    shares = torch.exp(lses - base)
    return (shares[..., None] * outputs).sum(0), lse
