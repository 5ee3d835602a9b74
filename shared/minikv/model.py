"""What does the model compute for one token, and where does it need the others?

A decoder maps tokens to logits. All of it but one place works on each token alone: embedding,
norms, projections, MLP. So the tokens of a batch are one flat list of rows, whichever requests
they belong to and however many each has; the linear layers see one matrix. The one place is
attention, and it is handed in: `attend(layer, q, k, v)` gets the queries, keys and values of the
rows and returns what each query reads. With `attention.Causal` the rows are one whole sequence;
with `attention.PagedBatch` keys and values go to and come from the KV cache. The model knows
neither caches nor schedules.

Llama and Qwen3 differ by the norm that Qwen3 puts on each query and key head. Parameters carry the
names of the checkpoints on the Hugging Face hub, so loading needs no table of names; once they are
loaded, `fuse` turns the linear layers into the products that `linear.py` explains. The numerics
follow transformers 5.24.0, models/llama/modeling_llama.py and models/qwen3/modeling_qwen3.py.

Shapes: T rows (tokens), `hidden_size` features; q [T, heads, head_dim], k and v
[T, kv_heads, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minikv.linear import Product, product

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1's stretch of the rotary embedding to a longer context than it was trained on.

    Slow rotations (long wavelengths) are slowed by `factor`, fast ones are kept, those between the
    two bounds are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The part of config.json that the model is built from. `qk_norm` makes it a Qwen3."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers, in bytes."""
        per_layer = 2 * self.num_key_value_heads * self.head_dim * dtype.itemsize
        return self.num_hidden_layers * per_layer


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position for each pair of head dimensions, float32 [head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    freq = 1.0 / config.rope_theta ** (exponent / config.head_dim)
    rope = config.rope_scaling
    if rope is None:
        return freq
    wavelength = 2 * math.pi / freq  # positions per turn
    turns = rope.original_max_position_embeddings / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: slowed, 1: kept
    return (1 - blend) * freq / rope.factor + blend * freq


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle. x [T, heads, head_dim]; cos, sin
    [T, 1, head_dim / 2]. The product of a turned q and k depends on their distance alone."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    """x / root-mean-square(x) * weight; computed in float32, whatever the model's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    qkv: Product
    out: Product

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, q_size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=bias)
        norm = config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if norm else nn.Identity()

    def fuse(self) -> None:
        self.qkv = product(self.q_proj, self.k_proj, self.v_proj)
        self.out = product(self.o_proj)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split(self.heads, dim=1)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.out(attend(self.layer, q, k, v).flatten(1))


class MLP(nn.Module):
    gate_up: Product
    down: Product

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def fuse(self) -> None:
        self.gate_up, self.down = product(self.gate_proj, self.up_proj), product(self.down_proj)
        del self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # From an empty matrix, not by size: no random start, which the weights would replace. (On
        # torch's meta device that start costs seconds: it loads the compiler.)
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """The whole model. `forward` gives hidden states; `logits` turns the rows that are needed into
    scores, which is most of the work for a small model: a prompt needs them for its last row.

    It is built, filled (`weights.py`), then fused; only then it can run."""

    rope: Tensor
    head: Product
    num_weights: int
    """As many as the model learned: a matrix that is used twice counts once."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("rope", rope_frequencies(config), persistent=False)

    def fuse(self) -> None:
        """Turn the linear layers into products, and drop their parameters."""
        self.num_weights = sum({p.data_ptr(): p.numel() for p in self.parameters()}.values())
        for part in list(self.modules()):
            if isinstance(part, Attention | MLP):
                part.fuse()
        self.head = product(self.lm_head)
        del self.lm_head

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: int64 [T]; returns hidden states [T, hidden_size]."""
        x = self.model.embed_tokens(token_ids)
        angles = (positions[:, None].float() * self.rope)[:, None, :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to float32 [n, vocab_size]."""
        return self.head(hidden).float()
