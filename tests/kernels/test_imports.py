"""What each part can do without."""

import subprocess
import sys
from pathlib import Path

import minikv


def imported_without(missing, wanted):
    program = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); import {wanted}"
    command = [sys.executable, "-c", program]
    shared = Path(minikv.__file__).parents[1]
    return subprocess.run(command, cwd=shared, capture_output=True, text=True)


def test_attention_and_model_need_little_more_than_torch(kernels):
    """A bare GPU machine has no tokenizers, jinja2, cbor2."""
    missing = ["tokenizers", "jinja2", "cbor2", "transformers", "kvlab"]
    wanted = "minikv.attention.kernels, minikv.attention.online, minikv.model, minikv.weights"
    run = imported_without(missing, wanted)
    assert run.returncode == 0, run.stderr
    assert "halted" in imported_without(missing, "minikv.engine").stderr


def test_only_the_kernels_need_triton():
    run = imported_without(["triton"], "minikv.attention.online, minikv.model, minikv.weights")
    assert run.returncode == 0, run.stderr
    assert "halted" in imported_without(["triton"], "minikv.attention.kernels").stderr
