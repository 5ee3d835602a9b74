"""What an engine takes of main memory, told before it is started."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from kvlab import memory, models
from kvlab.engines.protocol import EngineError

WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number."""


def check(name: str, parts: Mapping[str, int], cure: str) -> None:
    """Raise EngineError if the machine has less free memory than all parts together.

    parts: bytes, by what they are for; cure: what would make them smaller.
    """
    needed, free = sum(parts.values()), memory.available()
    if needed > free:
        listed = ", ".join(f"{_gib(size)} {what}" for what, size in parts.items())
        raise EngineError(
            f"{name} needs about {_gib(needed)} of memory ({listed}), and {_gib(free)} are free. "
            f"Stop other engines and kernels (`.venv/bin/kvlab engines running`\n"
            f"lists them), or {cure}."
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def weights(folder: Path) -> int:
    """How many numbers a model's safetensors hold; raises if a file is missing or incomplete.

    A safetensors file is 8 bytes N (little endian), N bytes of JSON with each tensor's shape and
    place, then the tensors: https://github.com/huggingface/safetensors#format
    """
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"].values()
            files = {folder / name for name in names}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise EngineError(f"{index} cannot be read: get the model anew.") from None
    if not files:
        raise EngineError(f"No weights in {folder}: there is no .safetensors file.")
    numbers = 0
    for path in sorted(files):
        if not path.is_file():
            raise EngineError(f"The model in {folder} is incomplete: {path.name} is missing.")
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length) if length < size else b"")
            header.pop("__metadata__", None)
            tensors = [int(math.prod(tensor["shape"])) for tensor in header.values()]
            whole = 8 + length + max(tensor["data_offsets"][1] for tensor in header.values())
        except (ValueError, LookupError, TypeError, AttributeError):
            raise EngineError(f"{path} is not a whole safetensors file: get it anew.") from None
        if size != whole:
            raise EngineError(
                f"{path} has {size} bytes, but its header speaks of {whole}: it was cut short. "
                f"Get the model anew."
            )
        numbers += sum(tensors)
    return numbers


def kv_bytes(folder: Path, dtype: str, tokens: int) -> int:
    """Bytes of the KV of so many tokens: K and V of every layer and KV head."""
    config = models.config(folder)
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        numbers = int(2 * config["num_hidden_layers"] * kv_heads * head_dim * tokens)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        place = folder / "config.json"
        raise EngineError(f"{place} does not say its layers and heads: get it anew.") from None
    return numbers * WIDTH[dtype]
