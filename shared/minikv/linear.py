"""How does a matrix product with fixed weights become fast on a CPU?

Two things, both done once, when the model is loaded. Layers with one input become one product: the
queries, keys and values of a layer, or gate and up of an MLP, are rows of one taller matrix. And
the matrix is stored in the order in which the processor's kernel reads it ("packed"), so that no
call has to reorder it. That is most of what a server for CPUs does to its linear layers: vLLM
0.32.0 packs them through oneDNN as well (model_executor/layers/utils.py,
`dispatch_cpu_unquantized_gemm`).

oneDNN comes with torch; its packed product is the operator that torch's own compiler emits
(torch/_inductor/fx_passes/mkldnn_fusion.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]"""

ROWS = 16
"""For how many rows the packed order is made; others are computed as rightly, a little slower."""


def product(*layers: nn.Linear) -> Product:
    """The products of layers that have one input, side by side: [T, in] -> [T, sum of out].

    The weights are copied; the layers' own may be dropped afterwards.
    """
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    if not _packs(weight):
        return lambda x: F.linear(x, weight, bias)
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, ROWS)
    return lambda x: ops._linear_pointwise(x, packed, bias, "none", [], "")


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel for such weights here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
