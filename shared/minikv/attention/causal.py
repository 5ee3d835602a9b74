"""What is attention, with nothing remembered?

    out[i] = sum over j <= i of softmax_j(q[i] . k[j] / sqrt(head_dim)) * v[j]

Each query reads all tokens up to its own. With grouped-query attention several query heads share
one key and value head: heads // kv_heads of them, side by side.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Causal:
    """Attention of one sequence to itself, all of it in this pass; keeps nothing."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, head_dim]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)
