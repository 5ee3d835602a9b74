"""Where there is a GPU the kernels run on it; elsewhere in Triton's interpreter.

Needs torch, triton, numpy, safetensors and pytest, and nothing else: `make test-gpu` runs these
tests on a machine that has no more.
"""

import importlib.metadata
import importlib.util
import os
import random

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
SEED = int(os.environ.get("KERNELS_SEED") or random.randrange(2**32))


def _version(package):
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def _refusal():
    """Why no kernel runs here, not even interpreted; "" if it does."""
    if importlib.util.find_spec("triton") is None:
        return "no kernel runs without triton: pip install triton"
    if not ON_GPU and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        return "the interpreter of Triton before 3.7 needs numpy before 2.4"
    return ""


REFUSAL = _refusal()


def pytest_report_header():
    where = torch.cuda.get_device_name() if ON_GPU else "Triton's interpreter, on the CPU"
    return f"kernels: {REFUSAL or where}; torch {torch.__version__}; KERNELS_SEED={SEED}"


COMPILED = pytest.StashKey[dict]()


def pytest_terminal_summary(terminalreporter, config):
    """What a Hopper GPU would be given: test_compiled.py found it out."""
    report = config.stash.get(COMPILED, None)
    if not report:
        return
    terminalreporter.section(f"compiled for sm_90a by Triton {report['triton']}")
    for row in report["kernels"]:
        terminalreporter.line(
            f"{row['kernel']:8}{row['dtype']:9} head_dim {row['head_dim']:3} group {row['group']}: "
            f"{row['registers']:3} registers, {row['spilled_bytes']} bytes spilled, "
            f"{row['shared_bytes']} bytes shared"
        )


def pytest_collection_modifyitems(items):
    for item in items:
        if not ON_GPU and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no GPU: torch.cuda.is_available() is False"))


@pytest.fixture(scope="session")
def kernels():
    """The module under test."""
    if REFUSAL:
        pytest.skip(REFUSAL)
    from minikv.attention import kernels

    return kernels


@pytest.fixture
def rng(request):
    """Fresh numbers in each run: the seed stands at the top, and KERNELS_SEED sets it."""
    seed = f"{SEED} {request.node.name}"
    torch.manual_seed(random.Random(seed).randrange(2**62))
    return random.Random(seed)
