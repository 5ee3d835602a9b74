"""A model runs on the kernels as on torch's attention: the same logits in every step."""

import json

import pytest
import torch
from paged_case import DEVICE
from safetensors.torch import save_file

from minikv.attention import Causal, KVCache, PagedBatch, Segment
from minikv.model import CausalLM, ModelConfig
from minikv.weights import load_model

BLOCK = 16
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=False,
    qk_norm=False,
)
# What each step computes of three requests, (start, end) by request: whole prompts, chunks, decodes
# and mixed batches, a chunk of one token among them; one request joins late.
STEPS = [
    {0: (0, 30), 1: (0, 5)},
    {0: (30, 71), 1: (5, 6)},
    {2: (0, 33), 1: (6, 7), 0: (71, 72)},
    {0: (72, 73), 1: (7, 8), 2: (33, 34)},
]


@pytest.fixture
def model(rng, tmp_path):
    """A random Llama, by way of a model file."""
    made = CausalLM(CONFIG)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(float(name.endswith("norm.weight")), 0.15)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return load_model(tmp_path, CONFIG, torch.float32, DEVICE)


@torch.inference_mode()
def run(model, batch, tokens):
    """Logits of every row of every step, [rows, vocab] by request."""
    cache = KVCache(CONFIG, 20, BLOCK, torch.float32, DEVICE)
    for x in [*cache.k, *cache.v]:
        x.fill_(torch.nan)
    tables = {0: [7, 2, 9, 4, 11], 1: [3], 2: [8, 1, 12]}
    logits = {request: [] for request in tokens}
    for step in STEPS:
        attend = batch(cache, [Segment(*share, tables[r]) for r, share in step.items()])
        ids = torch.cat([tokens[r][start:end] for r, (start, end) in step.items()])
        rows = model.logits(model(ids, attend.positions, attend))
        for r, part in zip(step, rows.split([b - a for a, b in step.values()]), strict=True):
            logits[r].append(part)
    return {r: torch.cat(parts) for r, parts in logits.items()}


@pytest.mark.parametrize("name", ["TritonBatch", "PagedBatch"])
def test_logits_with_a_cache_are_those_without(kernels, rng, model, name):
    tokens = {
        r: torch.randint(0, 320, (n,), device=DEVICE) for r, n in {0: 73, 1: 8, 2: 34}.items()
    }
    batch = kernels.TritonBatch if name == "TritonBatch" else PagedBatch
    logits = run(model, batch, tokens)
    for r, ids in tokens.items():
        with torch.inference_mode():
            wanted = model.logits(model(ids, torch.arange(len(ids), device=DEVICE), Causal()))
        assert wanted.std() > 0.5  # logits that say nothing would hide an error
        torch.testing.assert_close(logits[r], wanted, rtol=0, atol=1e-3)
