"""`kvlab doctor`: what this machine can run, and why not the rest, in one table.

Works before the set-up too: under a bare Python with the standard library alone it
prints plain lines, in the notebook environment a table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvlab import environments, memory
from kvlab.paths import VENV, SetupError, cache, existing, run_plainly
from kvlab.setup import refusal

_SET_UP = "Not made yet: `make setup` makes it."


class Finding(NamedTuple):
    """What there is of one part of the machine or the set-up."""

    found: str
    verdict: str
    """what this means, or what is missing and what to do"""
    ok: bool | None
    """None: not there, and wanted by some chapters only."""


_MARKS = {True: "ok", False: "NO", None: "-"}


def chromium() -> Path | None:
    """The Chromium (or Chrome) that drives the browser test, if this machine has one."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    refused = refusal()
    return Finding(f"{version} ({sys.executable})", refused or "fits", not refused)


def _cpu() -> Finding:
    model, flags = "unknown CPU", set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = set(value.split())
    cores = len(os.sched_getaffinity(0))
    found = f"{model}, {cores} core{'s' * (cores != 1)}"
    if "avx512f" in flags:
        return Finding(found, "AVX-512: vLLM's CPU build runs", True)
    if "avx2" in flags:
        return Finding(found, "AVX2: vLLM's CPU build runs", True)
    return Finding(found, "No AVX2: vLLM's CPU build does not run; minikv does.", False)


def _memory() -> Finding:
    total, free = memory.of_machine()[0] / 1e9, memory.available() / 1e9
    enough = free >= 4
    verdict = (
        "enough for a lab" if enough else "A lab with an engine wants 4 GB: end some programs."
    )
    return Finding(f"{free:.1f} of {total:.1f} GB free", verdict, enough)


def _disk() -> Finding:
    """Room for what is still to be installed."""
    device = environments.device()
    missing = 0.0
    if not environments.is_whole(VENV):
        missing += environments.SIZES["notebook", device][1]
    if not environments.is_whole(environments.folder("vllm")):
        missing += environments.SIZES["vllm", device][1]
    free = shutil.disk_usage(existing(cache())).free / 1e9
    found = f"{free:.0f} GB free for {cache()}"
    if free < missing + 1:
        return Finding(found, f"The set-up still wants {missing + 1:.1f} GB: free some.", False)
    return Finding(found, "enough", True)


def _gpu() -> Finding:
    gpu = environments.gpu()
    device, reason = environments.device_and_reason()
    if isinstance(gpu, str):
        found = "none"
    else:
        found = (
            f"{gpu.name}, {gpu.memory / 1e9:.0f} GB, compute capability "
            f"{gpu.capability[0]}.{gpu.capability[1]}, driver for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
        )
    # A machine without a GPU is a normal one; a GPU that cannot be used is worth a mark.
    return Finding(found, f"{reason}: {device} builds", isinstance(gpu, str) or device == "cuda")


def _runs(python: Path, module: str) -> str:
    """ "" if the module imports there, else the last line of the error."""
    asked = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    return "" if asked.returncode == 0 else (asked.stderr.strip().splitlines() or ["it failed"])[-1]


def _environment(place: Path, module: str, deep: bool) -> Finding:
    if not environments.is_whole(place):
        return Finding("missing", _SET_UP, False)
    wrong = _runs(place / "bin" / "python", module) if deep else ""
    if wrong:
        return Finding(str(place), f"{wrong}. Remove this folder, then `make setup`.", False)
    return Finding(str(place), f"{module} imports" if deep else "whole", True)


def _optional(name: str, module: str, deep: bool) -> Finding:
    """An environment that only some chapters want, and that `make test` makes."""
    place = environments.folder(name)
    if environments.is_whole(place):
        return _environment(place, module, deep)
    _, disk = environments.SIZES[name, environments.device()]
    install = f".venv/bin/kvlab engines install {name}"
    how = f"Chapters that want it say so: {install} ({disk} GB on disk)."
    return Finding("not installed", how, None)


def _model(deep: bool) -> Finding:
    from kvlab import models

    place = cache() / "models" / models.DEFAULT
    if not place.exists():
        return Finding(f"{models.DEFAULT}: missing", _SET_UP, False)
    wrong = models.damage(place, deep)
    if wrong:
        return Finding(str(place), f"Damaged ({wrong}): remove it, then `make setup`.", False)
    return Finding(str(place), "checksums right" if deep else "whole", True)


def _chromium() -> Finding:
    found = chromium()
    if found:
        return Finding(str(found), "the browser test runs", True)
    how = "The browser test is skipped. On Debian or Ubuntu: sudo apt install chromium"
    return Finding("none", how, False)


def findings(deep: bool = False) -> dict[str, Finding]:
    """What there is, by part. deep: read every byte of the model, import torch and vLLM."""
    looks: dict[str, Callable[[], Finding]] = {
        "Python": _python,
        "CPU": _cpu,
        "Memory": _memory,
        "GPU": _gpu,
        "Disk": _disk,
        "Notebook environment": lambda: _environment(VENV, "torch", deep),
        "vLLM environment": lambda: _environment(environments.folder("vllm"), "vllm", deep),
        "SGLang environment": lambda: _optional("sglang", "sglang", deep),
        "Router environment": lambda: _optional("router", "sglang_router", deep),
        "Model": lambda: _model(deep),
        "Chromium": _chromium,
    }

    def look(part: str) -> Finding:
        try:
            return looks[part]()
        except (SetupError, OSError) as error:  # a bad setting, a folder that is not ours to read
            return Finding("?", str(error), False)

    return {part: look(part) for part in looks}


def report(deep: bool = False) -> None:
    """Print the table; as plain lines where rich is not installed."""
    found = findings(deep)
    if importlib.util.find_spec("rich") is None:
        for part, row in found.items():
            print(f"{_MARKS[row.ok]:3}{part}: {row.found}\n     {row.verdict}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="What this machine can run", title_justify="left")
    for heading in ("", "part", "found", "so"):
        table.add_column(heading, overflow="fold")
    for part, row in found.items():
        mark = Text(_MARKS[row.ok], {True: "green", False: "red", None: "dim"}[row.ok])
        table.add_row(mark, part, Text(row.found), Text(row.verdict))
    Console().print(table)

    from kvlab import systems

    with contextlib.suppress(SetupError):  # a bad setting, which the table above has named
        systems.print_table()


if __name__ == "__main__":
    sys.exit(run_plainly(report))
