"""One prompt through transformers, minikv and vLLM: do the three agree?

In float32, greedy, the three must give the same tokens. If they do, the
environments, the model and the engines work together on this machine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvlab import environments, models
from kvlab.paths import VENV, SetupError, lock, make_cache

PROMPT = "The key-value cache of a language model holds"
MAX_TOKENS = 12


def with_transformers(model: Path, ids: list[int]) -> list[int]:
    """The reference: Hugging Face's own implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([ids])
    output = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(ids) :].tolist()
    return tokens


def with_minikv(model: Path, ids: list[int]) -> list[int]:
    """The stack that the course builds."""
    from minikv import LLM, SamplingParams

    engine = LLM(model, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return list(engine.generate([ids], params)[0].token_ids)


def with_vllm(model: Path, ids: list[int]) -> list[int]:
    """The real engine, in its own environment and process."""
    from kvlab.engines import vllm
    from kvlab.engines.protocol import EngineError

    try:
        with vllm.start(model, dtype="float32") as engine:
            done = engine.generate(ids, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
            return list(done.token_ids)
    except EngineError as error:
        raise SetupError(
            f"Everything is installed, but vLLM did not pass the self-check.\n{error}\n"
            "Run the same command again; `.venv/bin/kvlab doctor --deep` checks what is installed."
        ) from error


WAYS: dict[str, Callable[[Path, list[int]], list[int]]] = {
    "transformers": with_transformers,
    "minikv": with_minikv,
    "vLLM": with_vllm,
}


def run() -> None:
    """Send the prompt through all three and print a table.

    Raises SetupError if their tokens differ.
    """
    from tokenizers import Tokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = models.get(models.DEFAULT)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT).ids
    table = Table(title=f"{PROMPT!r}, {MAX_TOKENS} tokens, float32, greedy", title_justify="left")
    for heading in ("", "seconds with its start", "text", "tokens"):
        table.add_column(heading)
    console = Console()
    answers = {}
    for name, way in WAYS.items():
        with console.status(f"Self-check: {name}"):
            began = time.monotonic()
            answers[name] = way(model, ids)
            seconds = time.monotonic() - began
        equal = answers[name] == answers["transformers"]
        same = "" if name == "transformers" else "the same" if equal else "DIFFERENT"
        text = tokenizer.decode(answers[name])
        table.add_row(name, f"{seconds:.1f}", repr(text), same)
    console.print(table)
    different = [name for name in WAYS if answers[name] != answers["transformers"]]
    if different:
        raise SetupError(
            f"The tokens of {' and '.join(different)} differ from those of transformers:\n"
            f"{json.dumps(answers)}\n"
            "Something on this machine computes otherwise. `.venv/bin/kvlab doctor --deep`\n"
            "checks the files; please report what it prints, with the lines above."
        )


def run_where_changed() -> None:
    """Run the self-check, unless it passed with just these environments and this model."""
    parts = [
        (VENV / environments.MARKER).read_text() if VENV.exists() else "",
        environments.folder("vllm").name,
        (models.get(models.DEFAULT) / models.MANIFEST).read_text(),
    ]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    passed = make_cache("selfcheck") / key
    if passed.exists():
        return
    with lock("selfcheck", "checking that the engines agree"):
        if not passed.exists():
            print("Checking that transformers, minikv and vLLM agree (about a minute).", flush=True)
            run()
            passed.touch()
