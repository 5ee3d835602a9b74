"""The whole engine on the kernels: the same tokens as on torch's attention."""

import json
import sys

import pytest
import torch
from paged_case import DEVICE
from safetensors.torch import save_file

pytest.importorskip("tokenizers", reason="the engine needs tokenizers, jinja2 and cbor2")

from minikv import LLM, SamplingParams
from minikv.model import CausalLM
from minikv.weights import model_config

CONFIG = dict(
    model_type="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def test_the_engine_gives_the_same_tokens(kernels, rng, tmp_path):
    """Chunks, mixed batches, and a prompt whose beginning is in the cache already."""
    model = CausalLM(model_config(CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(name.endswith("norm.weight")), 0.3)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shared = [rng.randrange(320) for _ in range(20)]
    prompts = [shared, [*shared, 7, 8, 9], [5]]
    outputs = {}
    for attention in ("torch", "triton"):
        llm = LLM(
            tmp_path,
            dtype="float32",
            device=DEVICE.type,
            attention=attention,
            block_size=16,
            max_num_batched_tokens=16,
        )
        params = SamplingParams(max_tokens=3)
        found = [llm.generate(prompts[0], params)[0], *llm.generate(prompts[1:], params)]
        assert found[1].cached_tokens == 16
        outputs[attention] = found
    for theirs, ours in zip(*outputs.values(), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def test_an_unknown_attention_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="must be torch or triton"):
        LLM(tmp_path, dtype="float32", device="cpu", attention="flash")


def test_without_triton_it_says_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "minikv.attention.kernels", raising=False)
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        LLM(tmp_path, dtype="float32", device="cpu", attention="triton")
