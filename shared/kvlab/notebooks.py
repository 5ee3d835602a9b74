"""From hand-written notebooks to executed ones, and from solutions to labs.

chapters/ and solutions/ are written by hand. labs/ are made from solutions/:
the lines between `### BEGIN SOLUTION` and `### END SOLUTION` are taken out and
the cells that show verdicts are tagged, because their outputs change once a
learner has worked. All three are executed and committed with their outputs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from kvlab.paths import ROOT, cache

CELL_TIMEOUT_SECONDS = 2000  # as nbval has it
# The kernel that set-up registers; see kvlab.jupyter.
KERNEL = {
    "display_name": "Follow the Request",
    "language": "python",
    "name": "follow-the-request",
}

_SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION[ \t]*(?:\n|$)",
    re.MULTILINE | re.DOTALL,
)
_CHECK_CALL = re.compile(r"^check\(", re.MULTILINE)
NOT_COMPARED = "nbval-ignore-output"


class NotebookError(Exception):
    """A notebook that cannot be made, found or executed; the text says which and why."""


def lab_from_solution(solution: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The lab of a solution: open exercises, no outputs, verdict cells not compared.

    Raises NotebookError for marks that do not pair up.
    """
    lab = nbformat.from_dict(solution)
    for cell in lab.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        cell.source = _SOLUTION.sub(_stub, cell.source).rstrip("\n")
        if "# BEGIN SOLUTION" in cell.source or "# END SOLUTION" in cell.source:
            raise NotebookError(f"BEGIN and END SOLUTION do not pair up in cell {cell.id}")
        if _CHECK_CALL.search(cell.source):
            tags = cell.metadata.setdefault("tags", [])
            if NOT_COMPARED not in tags:
                tags.append(NOT_COMPARED)
    return lab


def _stub(block: re.Match[str]) -> str:
    # Inside a function an unwritten answer must say so when it is called.
    if block["indent"]:
        return f"{block['indent']}raise NotImplementedError  # your code here\n"
    return ""


def execute(notebook: nbformat.NotebookNode, folder: Path, **client: Any) -> None:
    """Run all cells in place, in `folder`, under the notebook environment's own kernel.

    Raises NotebookError with the failing cell and its error.
    """
    try:
        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_SECONDS,
            kernel_name="python3",
            config=Config({"KernelManager": {"transport_encryption": "auto"}}),
            record_timing=False,
            store_widget_state=False,
            resources={"metadata": {"path": str(folder)}},
            **client,
        ).execute()
    except CellExecutionError as error:
        raise NotebookError(f"a cell failed:\n{error}") from None
    except TimeoutError:
        raise NotebookError(f"a cell ran for more than {CELL_TIMEOUT_SECONDS} seconds") from None


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leave in an executed notebook only what its readers and nbval use."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict(
            {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        )
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", ()):
            # A saved widget view without its state shows as an error on static
            # pages; the SVG beside it is what they show instead.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            output.get("metadata", {}).clear()


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs, with what was printed in one go in one piece: a busy machine sends several."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Save a notebook, refusing one that names folders of the machine it ran on."""
    text = nbformat.writes(notebook) + "\n"
    for private in {str(ROOT), str(cache()), str(Path.home())} - {"/"}:
        if private in text:
            raise NotebookError(f"{path.name} would contain the path {private} of this machine")
    path.write_text(text)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def make(only: Iterable[str] = (), say: Callable[[str], None] = print) -> None:
    """Execute chapters and solutions, make the labs and execute them; write all back.

    `only`: number prefixes such as "00"; all notebooks when empty.
    """
    prefixes = tuple(only)
    for path in _sources(prefixes):
        notebook = read(path)
        jobs = [(notebook, path)]
        if path.parent.name == "solutions":
            jobs.append((lab_from_solution(notebook), _lab_path(path)))
        for job, target in jobs:
            target.parent.mkdir(exist_ok=True)
            say(f"executing {target.relative_to(ROOT)}")
            execute(job, target.parent)
            tidy(job)
            write(job, target)


def stale_labs() -> list[str]:
    """Labs whose cells are not those that their solution would give, one sentence each."""
    complaints = []
    solutions = {_lab_path(path): path for path in _sources(()) if path.parent.name == "solutions"}
    for lab_path in sorted({*solutions, *(ROOT / "labs").glob("*.ipynb")}):
        if lab_path not in solutions:
            complaints.append(f"labs/{lab_path.name} has no solution")
        elif not lab_path.exists():
            complaints.append(f"labs/{lab_path.name} was never made: run make notebooks")
        else:
            expected = lab_from_solution(read(solutions[lab_path]))
            if _cells(expected) != _cells(read(lab_path)):
                complaints.append(
                    f"labs/{lab_path.name} differs from its solution: edit the solution, "
                    "then run make notebooks"
                )
    return complaints


def _cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str, list[str]]]:
    return [
        (cell.cell_type, cell.id, cell.source, list(cell.metadata.get("tags", [])))
        for cell in notebook.cells
    ]


def copy_labs(into: Path) -> list[Path]:
    """Copy labs that a learner does not have yet, without outputs, which would answer what an
    exercise asks. A copy is never overwritten."""
    into.mkdir(exist_ok=True)
    copied = []
    for lab in sorted((ROOT / "labs").glob("*.ipynb")):
        target = into / lab.name
        if not target.exists():
            notebook = read(lab)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs, cell.execution_count = [], None
            partial = target.with_suffix(".partial")
            partial.write_text(nbformat.writes(notebook) + "\n")
            partial.rename(target)
            copied.append(target)
    return copied


def reset(prefix: str) -> tuple[Path, Path | None]:
    """Bring a lab back into my/ as it came: (the fresh copy, where the old one is now).

    Raises NotebookError where no lab has that number.
    """
    labs = sorted((ROOT / "labs").glob(f"{prefix.removeprefix('my/')}*.ipynb"))
    if len(labs) != 1 or not prefix:
        there = ", ".join(path.name[:2] for path in sorted((ROOT / "labs").glob("*.ipynb")))
        raise NotebookError(f"{prefix!r} names no lab; there are {there}")
    mine = ROOT / "my" / labs[0].name
    kept = None
    if mine.exists():
        numbers = (n for n in range(1, 10_000))
        kept = next(
            path
            for n in numbers
            if not (path := mine.with_name(f"{mine.stem}.old-{n}.ipynb")).exists()
        )
        mine.rename(kept)
    copy_labs(ROOT / "my")
    return mine, kept


def find(name: str) -> Path:
    """The notebook meant by "labs/00", "my/00_one_request" or a path.

    Raises NotebookError that lists what there is.
    """
    path = Path(name)
    if path.suffix == ".ipynb" and path.exists():
        return path.resolve()
    folder, _, prefix = name.removesuffix(".ipynb").rpartition("/")
    matches = sorted((ROOT / folder).glob(f"{prefix}*.ipynb")) if folder else []
    if len(matches) == 1:
        return matches[0]
    there = [
        str(p.relative_to(ROOT))
        for part in ("chapters", "labs", "solutions", "my")
        for p in sorted((ROOT / part).glob("*.ipynb"))
    ]
    what = "names several notebooks" if matches else "names no notebook"
    raise NotebookError(f"{name} {what}. There are: {', '.join(there)}")


def run(name: str) -> None:
    """Execute a notebook in the terminal and print what its cells print, as it comes.

    The file stays as it is. Raises NotebookError when a cell fails.
    """
    path = find(name)
    notebook = read(path)
    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    done = 0

    def executed(cell: nbformat.NotebookNode, **_: Any) -> None:
        nonlocal done
        if cell.cell_type != "code":
            return
        done += 1
        if sys.stderr.isatty():
            print(f"\r{path.name}: cell {done} of {total}", end="", file=sys.stderr)
        if text := _plain_text(cell):
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
            print(text, flush=True)

    execute(notebook, path.parent, on_cell_executed=executed)
    print(f"{path.name}: all {total} code cells ran")


# What makes nbval run a cell without looking at how it ends (nbval 0.11.0, plugin.py).
_DISARMED_TAGS = {"nbval-skip", "raises-exception", "nbval-raises-exception"}
_DISARMED = re.compile(r"#\s*NBVAL_(SKIP|RAISES_EXCEPTION)\b")


def unchecked(path: Path) -> list[str]:
    """Ids of a lab's exercises that a copy of it, under whatever name, does not check any more."""
    from kvlab.exercises import load_all

    number = path.name[:2]
    if not list((ROOT / "labs").glob(f"{number}_*.ipynb")):
        return []
    checked = set()
    for cell in read(path).cells:
        armed = _DISARMED_TAGS.isdisjoint(cell.metadata.get("tags", ()))
        if cell.cell_type == "code" and armed and not _DISARMED.search(cell.source):
            checked |= _checks(cell.source)
    return sorted(id for id in load_all() if id[:2] == number and id not in checked)


def _checks(source: str) -> set[str]:
    """Ids that a cell's own statements check, as in check("00.1", answer)."""
    if source.startswith("%%"):  # another language, or nothing that runs
        return set()
    lines = [line for line in source.split("\n") if not line.lstrip().startswith(("%", "!"))]
    try:
        statements = ast.parse("\n".join(lines)).body
    except SyntaxError:
        return set()
    calls = [
        s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
    ]
    return {
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "check"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


def _plain_text(cell: nbformat.NotebookNode) -> str:
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return "\n".join(part.rstrip() for part in parts)


def _sources(prefixes: tuple[str, ...]) -> list[Path]:
    """Chapters, then solutions: the notebooks that are written by hand."""
    return [
        path
        for part in ("chapters", "solutions")
        for path in sorted((ROOT / part).glob("*.ipynb"))
        if not prefixes or path.name.startswith(prefixes)
    ]


def _lab_path(solution: Path) -> Path:
    return ROOT / "labs" / solution.name
