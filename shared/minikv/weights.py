"""What lies in a model folder, and is it all there?

A folder as it comes from the Hugging Face hub: config.json says what to build; model.safetensors
(or shards named by model.safetensors.index.json) holds the parameters by name;
generation_config.json adds the tokens that end an output. What this model code is known to
compute wrongly is refused by name instead of loaded. Pickled checkpoints are never opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minikv.model import CausalLM, Llama3Rope, ModelConfig

MODEL_TYPES = ("llama", "qwen3")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError says which file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is missing: is {path.parent} a model folder?") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json; ValueError names what is missing or not supported."""
    try:
        return _model_config(raw)
    except (TypeError, AttributeError) as error:  # a value of a kind that no such file has
        raise ValueError(f"config.json holds a value of the wrong kind: {error}") from None


def _model_config(raw: dict[str, Any]) -> ModelConfig:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; minikv knows {', '.join(MODEL_TYPES)}"
        )
    if raw.get("quantization_config") is not None:
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantised checkpoints ({method}) are not supported: use an original one")
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    if raw.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise ValueError(f"sliding window attention is not supported (layer types {layer_types})")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    missing = [
        name
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "max_position_embeddings",
        )
        if not isinstance(raw.get(name), int)
    ]  # fmt: skip
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")

    heads = raw["num_attention_heads"]
    # A key that is absent means what it means in transformers' Llama and Qwen3 configurations.
    llama = model_type == "llama"
    kv_heads = raw.get("num_key_value_heads") or (heads if llama else 32)
    head_dim = raw.get("head_dim") or (raw["hidden_size"] // heads if llama else 128)
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly")
    theta, scaling = _rope(raw)
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=raw["max_position_embeddings"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=model_type == "qwen3",
    )


def _rope(raw: dict[str, Any]) -> tuple[float, Llama3Rope | None]:
    """theta and scaling. Since transformers 5 both stand in `rope_parameters`; before that theta
    was a key of its own, and `rope_scaling` named its kind "rope_type" or, earlier, "type"."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: all of a head is rotated")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"RoPE type {kind!r} is not supported; minikv knows 'default', 'llama3'")
    names = Llama3Rope.__dataclass_fields__
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"RoPE type 'llama3' in config.json lacks {', '.join(missing)}")
    return theta, Llama3Rope(**{name: rope[name] for name in names})


def eos_token_ids(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    """Tokens that end an output: from generation_config.json if it names any, else config.json."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def load_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Build the model, fill it and fuse it. Every parameter must be there, in its shape, and no
    other.

    Raises ValueError that names the file or the parameters.
    """
    with torch.device("meta"):  # shapes only: the memory comes with the weights
        model = CausalLM(config)
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():
                    weights[name] = file.get_tensor(name).to(dtype)
        except FileNotFoundError:
            raise ValueError(f"weight file {path} is missing: fetch the model again") from None
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"weight file {path} is broken or cut short ({error}): fetch the model again"
            ) from None
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # some checkpoints store the tied matrix twice
    for name in [n for n in weights if n.endswith("rotary_emb.inv_freq")]:
        del weights[name]  # old Llama checkpoints: computed here from config.json

    problems = [f"{name} is missing" for name in wanted if name not in weights]
    problems += [f"{name} is unknown" for name in weights if name not in wanted]
    problems += [
        f"{name} has shape {list(weights[name].shape)}, config.json says {list(shape)}"
        for name, shape in wanted.items()
        if name in weights and weights[name].shape != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"weights in {folder}: {'; '.join(problems[:5])}{more}")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.requires_grad_(False).to(device).eval().fuse()
    return model


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; shards when there is an index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index} names {name!r}, which is not a file of its own folder")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError(
            f"{single} is missing: minikv loads safetensors only (no pickled .bin checkpoints)"
        )
    return [single]
