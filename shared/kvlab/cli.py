"""`kvlab`: the commands behind the Makefile's targets."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"{error}: .venv is damaged. `make clean`, then run the same command again.")

from kvlab.paths import SetupError, cache, run_plainly, size

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The apparatus of Follow the Request.",
)

Record = Annotated[bool, typer.Option(help="Write what it took to results/.")]


@app.command()
def setup(
    engines: Annotated[bool, typer.Option(help="Make the engines' environments too.")] = True,
    record: Record = False,
) -> None:
    """Set up what is missing and register the Jupyter kernel for the user."""
    from kvlab import setup

    setup.complete(user_kernel=True, engines=("vllm",) if engines else ())
    print("Everything is set up. In Jupyter, choose the kernel 'Follow the Request'.")
    if record:
        _record_setup()


def _record_setup() -> None:
    """results/setup.json: what a set-up from nothing took, and what a second one takes."""
    import subprocess

    from kvlab import environments, report
    from kvlab.paths import ROOT, VENV

    if "KVLAB_BEGAN" not in os.environ:
        raise SetupError("A record wants the whole way: `python3 -m kvlab.setup setup --record`.")
    seconds = time.time() - float(os.environ["KVLAB_BEGAN"])
    began = time.monotonic()
    again = [sys.executable, "-m", "kvlab.setup", "setup"]
    subprocess.run(again, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    device = environments.device()
    cores = len(os.sched_getaffinity(0))
    report.record(
        "setup",
        "set-up with an empty cache folder, to the passed self-check",
        {"device": device, "cores": cores},
        {
            "minutes": round(seconds / 60, 1),
            "again_seconds": round(time.monotonic() - began),
            "disk_gb": round(size(cache(), VENV) / 1e9, 1),
            "conditions_text": f"{cores} cores, {device} builds",
            # What the set-up announces. For CUDA it is an estimate.
            "download_gb": _announced(0, device),
            "cuda_download_gb": _announced(0, "cuda"),
            "cuda_disk_gb": _announced(1, "cuda"),
        },
    )


def _announced(which: int, device: str) -> int:
    from kvlab import environments

    # What `kvlab setup` installs: see setup.complete.
    sizes = [environments.SIZES[name, device] for name in ("notebook", "vllm")]
    return round(sum(size[which] for size in sizes) + 0.1)  # and the model


@app.command()
def lab(
    port: Annotated[int, typer.Option(help="The first port to try.")] = 8888,
) -> None:
    """Set up what is missing and open JupyterLab at the course."""
    from kvlab import jupyter, setup

    setup.complete()
    jupyter.lab(port)


@app.command("test")
def run_tests(record: Record = False) -> None:
    """Set up what is missing and run all tests."""
    from kvlab import environments, report, setup, suites

    setup.complete(engines=tuple(environments.HOLDS), check=False)
    code, rows = suites.run()
    if record and code == 0:
        cores, device = len(os.sched_getaffinity(0)), environments.device()
        report.record(
            "tests",
            "make test, each suite's minutes",
            {"device": device, "cores": cores},
            {
                "minutes": round(sum(float(row["minutes"]) for row in rows), 1),
                "suites": rows,
                "conditions_text": f"{cores} cores, {device} builds",
            },
        )
    raise typer.Exit(code)


engines = typer.Typer(no_args_is_help=True, help="The engines' environments.")
app.add_typer(engines, name="engines")
Names = Annotated[list[str], typer.Argument(help="Such as sglang.")]


def _known(names: list[str]) -> list[str]:
    from kvlab import environments

    for name in names:
        if name not in environments.HOLDS:
            there = "; ".join(f"{known} with {what}" for known, what in environments.HOLDS.items())
            raise SetupError(f"There is no environment {name!r}. There are: {there}.")
    return names


@engines.command("list")
def list_engines() -> None:
    """What is installed, how big it is, and what the rest would take."""
    from rich.console import Console
    from rich.table import Table

    from kvlab import environments

    device = environments.device()
    table = Table(title=f"Environments ({device})", title_justify="left")
    for heading in ("name", "holds", "state"):
        table.add_column(heading, overflow="fold")
    for name, holds in environments.HOLDS.items():
        place = environments.folder(name)
        if environments.is_whole(place):
            state = f"{size(place) / 1e9:.1f} GB in {place}"
        else:
            download, disk = environments.SIZES[name, device]
            state = f"not installed: {download} GB to download, {disk} GB on disk"
        if environments.trial(name, device).exists():
            state = f"on trial; {state}"
        table.add_row(name, holds, state)
    known = {environments.folder(name) for name in environments.HOLDS}
    others = set((cache() / "environments").glob("*")) - known
    if others:
        what = "older pins, other Pythons (`make test-python`)"
        table.add_row("others", what, f"{size(*others) / 1e9:.1f} GB in {len(others)} folders")
    Console().print(table)


@engines.command()
def running() -> None:
    """Which systems run now, how much memory they take, and who started them."""
    from rich.console import Console
    from rich.table import Table

    from kvlab.engines import process

    table = Table(title="Running systems", title_justify="left")
    for heading in ("system", "memory", "started by", "log"):
        table.add_column(heading, overflow="fold")
    for one in process.running():
        table.add_row(
            one.name, f"{one.bytes / 2**30:.1f} GiB", one.starter, str(one.log or "was removed")
        )
    Console().print(table if table.row_count else "None runs.")


@engines.command()
def install(names: Names) -> None:
    """Install what is missing of these; says before how big it is."""
    from kvlab import environments

    for name in _known(names):
        environments.build(name)
        print(f"There now: {environments.HOLDS[name]}.")


@engines.command("try")
def try_version(
    name: Annotated[str, typer.Argument(help="Such as sglang.")],
    versions: Annotated[
        list[str] | None, typer.Argument(help="Such as sglang==0.5.24; none: the course's again.")
    ] = None,
) -> None:
    """Use another version in this checkout, or go back to the course's."""
    from kvlab import environments, pins

    (name,), device = _known([name]), environments.device()
    if not versions:
        ended = pins.end_trial(name, device)
        print(f"{'Ended the trial: t' if ended else 'T'}he pins of {name} are the course's.")
        return
    moved = pins.start_trial(name, device, versions)
    print(
        f"In this checkout {name} is now with {', '.join(moved)}, until\n"
        f"`.venv/bin/kvlab engines try {name}`. Nothing in the course was seen with it.\n"
        f"`.venv/bin/kvlab engines install {name}` installs it."
    )


@engines.command()
def remove(names: Names) -> None:
    """Remove these environments, those of older pins too."""
    from kvlab import environments

    for name in _known(names):
        freed = environments.remove(name)
        print(f"Removed {environments.TITLES[name]}: {freed / 1e9:.1f} GB.")


@engines.command()
def compare(
    wheel: Annotated[Path, typer.Argument(help="What `pip download --no-deps vllm` brought.")],
    record: Record = False,
) -> None:
    """Compare the CPU build of vLLM with vLLM's own wheel, file by file."""
    from kvlab import sources

    found = sources.compare(wheel)
    print(f"{found['equal']} of {found['shared']} Python files are equal; not", end=" ")
    print(", ".join(found["different"]) or "one differs")
    if record:
        sources.record(found)


@engines.command()
def versions() -> None:
    """Which version of each system is pinned, and where the course has seen it run."""
    from kvlab import systems

    systems.print_table()


@engines.command()
def look(
    names: Annotated[
        list[str] | None, typer.Argument(help="Such as LMCache; default: all.")
    ] = None,
    record: Annotated[bool, typer.Option(help="Add what was seen to results/.")] = False,
) -> None:
    """Start each system, follow one request through it, and say what was seen."""
    from kvlab import systems

    seen = systems.run(names or [])
    if record:
        systems.record(seen)
    raise typer.Exit(len(seen) != len({name.lower() for name in names or ()} or systems.SYSTEMS))


@app.command("test-python")
def test_python(python: Annotated[Path, typer.Argument(help="Another Python.")]) -> None:
    """Run both packages' tests that need no engine under another Python, 3.11 or 3.12."""
    from kvlab import suites

    raise typer.Exit(suites.under(python))


@app.command()
def doctor(
    deep: Annotated[
        bool, typer.Option(help="Check the model's bytes and import torch and vLLM too.")
    ] = False,
) -> None:
    """Say in one table what this machine can run, and why not the rest."""
    from kvlab import doctor

    doctor.report(deep)


@app.command()
def selfcheck() -> None:
    """Compare transformers, minikv and vLLM on one prompt."""
    from kvlab import selfcheck

    selfcheck.run()


@app.command()
def run(name: Annotated[str, typer.Argument(help="Such as labs/00 or my/00.")]) -> None:
    """Execute a notebook in the terminal and print what its cells print."""
    from kvlab import notebooks

    try:
        notebooks.run(name)
    except notebooks.NotebookError as error:
        raise SetupError(str(error)) from error


@app.command()
def plan(
    role: Annotated[str, typer.Option(help="Such as backend or kernel.")] = "backend",
    hours: Annotated[float, typer.Option(help="How long you have.")] = 4,
) -> None:
    """Print an agenda of chapters and exercises for a role and a time."""
    from kvlab import course

    course.print_plan(role, hours)


@app.command()
def progress() -> None:
    """Print which exercises are passed in the saved notebooks of my/."""
    from kvlab import course
    from kvlab.paths import ROOT

    course.print_progress(ROOT / "my")


@app.command()
def reset(lab: Annotated[str, typer.Argument(help="The lab's number, such as 01.")]) -> None:
    """Bring a lab back into my/ as it came; the old copy is kept beside it."""
    from kvlab import notebooks

    try:
        fresh, kept = notebooks.reset(lab)
    except notebooks.NotebookError as error:
        raise SetupError(str(error)) from error
    if kept:
        print(f"Kept the old copy as my/{kept.name}.")
    print(f"my/{fresh.name} is as it came.")


@app.command("notebooks")
def make_notebooks(
    prefixes: Annotated[list[str] | None, typer.Argument(help="Such as 00; default: all.")] = None,
    check: Annotated[bool, typer.Option(help="Only say which labs are out of step.")] = False,
) -> None:
    """Execute chapters and solutions, and make the labs from the solutions."""
    from kvlab import notebooks

    try:
        if not check:
            notebooks.make(prefixes or ())
        elif stale := notebooks.stale_labs():
            raise SetupError("\n".join(stale))
    except notebooks.NotebookError as error:
        raise SetupError(str(error)) from error


@app.command("show")
def show_result(
    result: Annotated[Path, typer.Argument(help="A file of results/.")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare with.")] = None,
    subject: Annotated[
        list[str] | None, typer.Option(help="What may differ, such as conditions.flags.")
    ] = None,
) -> None:
    """Print a result, or compare two of which only the subject differs."""
    from kvlab import report

    if other is None:
        report.print_result(result)
    else:
        report.print_comparison(result, other, subject or [])


@app.command("replay")
def replay_trace(
    trace: Annotated[Path, typer.Argument(help="JSON lines as Mooncake's, with hash_ids.")],
    blocks: Annotated[int | None, typer.Option(help="What the cache holds; default: all.")] = None,
    cache: Annotated[str, typer.Option(help="object-lru, hash or radix.")] = "object-lru",
) -> None:
    """Send a trace of requests through a cache, and say how much would have been found."""
    from kvlab import replay
    from kvlab.workloads import WorkloadError

    try:
        replay.show(replay.replay(trace, cache, blocks))
    except WorkloadError as error:
        raise SetupError(str(error)) from error


@app.command()
def pages() -> None:
    """Bring the measured figures in README and CONTRIBUTING up to date."""
    from kvlab import report

    print("Changed:", ", ".join(report.fill_pages()) or "nothing")


@app.command()
def pins() -> None:
    """Resolve requirements/*.in into the pins files."""
    from kvlab import pins

    pins.make()


@app.command()
def clean(
    cache: Annotated[bool, typer.Option(help="The cache folder, not the checkout.")] = False,
) -> None:
    """Remove .venv and leftovers in the checkout, or the cache folder."""
    from kvlab import clean

    if cache:
        clean.cache_folder()
    else:
        clean.checkout()


def main() -> None:
    """The console script: what goes wrong in the set-up is told without a traceback."""
    if not sys.stderr.isatty():  # in a log each redrawing of a library's bar is one more line
        os.environ.setdefault("TQDM_DISABLE", "1")
    sys.exit(run_plainly(lambda: app()))


if __name__ == "__main__":
    main()
