"""`kvlab test`: every suite, each one's minutes, and an exit code that means all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvlab import environments
from kvlab.paths import ROOT

# Torch's threads wait for one another in a loop: with more of them than free cores,
# which is usual beside an engine, the same tests take several times as long.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Files, two at a time: an engine that starts keeps one core busy, and two memories of 4 GB. In the
# order of their names: by default those with few tests, which start most engines, come last.
_TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
_NO_TESTS_COLLECTED = 5  # pytest's exit code; also when a whole module is skipped


@dataclass(frozen=True)
class Suite:
    """A command in the notebook environment, and the paths that it looks at."""

    name: str
    command: tuple[str, ...]
    places: tuple[str, ...]
    in_front: str = ""
    """an environment whose packages are taken where both have one"""


SUITES = (
    Suite("ruff check", ("ruff", "check"), (".",)),
    Suite("ruff format", ("ruff", "format", "--check"), (".",)),
    Suite("types", ("mypy",), ("shared",)),
    Suite("workflows", ("zizmor", "--offline", "--quiet"), (".github/workflows",)),
    Suite(
        "workflow schema",
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
        (".github/workflows/cpu.yml", ".github/workflows/gpu.yml"),
    ),
    Suite("packages", ("pytest", "-q", *_TWO), ("tests/kvlab", "tests/minikv")),
    # In processes of their own: without a GPU they set TRITON_INTERPRET, which no engine may see.
    Suite("kernels", ("pytest", "-q", "-rs"), ("tests/kernels",)),
    Suite("kernels, older Triton", ("pytest", "-q", "-rs"), ("tests/kernels",), "triton"),
    Suite("notebooks", ("pytest", "-q", *_TWO, "--nbval"), ("chapters", "labs", "solutions")),
    Suite("browser", ("pytest", "-q", "-rs"), ("tests/browser",)),
)


def run(suites: tuple[Suite, ...] = SUITES) -> tuple[int, list[dict[str, str]]]:
    """Run all suites, whatever fails: (exit code, rows of the table)."""
    environment = _variables() | {
        # Without an engine its tests would skip, and the whole would pass: not here.
        "KVLAB_REQUIRE_ENGINES": "1",
        "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    _heed_ctrl_c()
    rows = []
    worst = 0
    for suite in suites:
        places = [place for place in suite.places if (ROOT / place).exists()]
        if not places:
            continue
        print(f"\n== {suite.name}", flush=True)
        tool, *arguments = suite.command
        # zizmor is a program only; the others are run as modules, whatever the folder is called.
        module = tool.replace("-", "_")
        start = [f"{sys.prefix}/bin/{tool}"] if tool == "zizmor" else [sys.executable, "-m", module]
        variables = dict(environment)
        if suite.in_front:
            inside = environments.python(suite.in_front)
            variables["PYTHONPATH"] = str(environments.site_packages(inside))
        began = time.monotonic()
        code = subprocess.run([*start, *arguments, *places], cwd=ROOT, env=variables).returncode
        minutes = (time.monotonic() - began) / 60
        skipped = code == _NO_TESTS_COLLECTED and suite.name == "browser"
        if code and not skipped:
            worst = 1
        result = "skipped" if skipped else "FAILED" if code else "passed"
        rows.append({"suite": suite.name, "minutes": f"{minutes:.1f}", "result": result})

    table = Table(title="Suites", title_justify="left")
    for column in ("suite", "minutes", "result"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    return worst, rows


def _variables() -> dict[str, str]:
    """This process's environment for pytest and the many processes that it starts."""
    # Set in many container images; it would have each of them compile torch's sources again.
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | _ONE_THREAD


def _heed_ctrl_c() -> None:
    """A shell starts a background job with Ctrl-C ignored, which whatever the job starts inherits;
    and some tests press it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def under(python: Path) -> int:
    """Run the packages' tests under another Python, in an environment of its own.

    Engine tests skip there: engines have been tested with the Python of .venv.
    Returns pytest's exit code. Raises SetupError.
    """
    _heed_ctrl_c()
    inside = environments.build("notebook", python)
    # The tests of the set-up want the pip of a .venv; an environment of uv's has none.
    subprocess.run([inside, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
    command = [str(inside), "-m", "pytest", "-q", "tests/minikv", "tests/kvlab"]
    path = f"{inside.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = _variables() | {"PYTHONPATH": str(ROOT / "shared"), "PATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode
