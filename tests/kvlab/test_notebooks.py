"""Labs follow from solutions, notebooks are clean, and nbval notices a changed number."""

import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kvlab import notebooks
from kvlab.paths import ROOT

COMMITTED = sorted(
    path for part in ("chapters", "labs", "solutions") for path in (ROOT / part).glob("*.ipynb")
)


def _solution(source):
    return new_notebook(cells=[new_code_cell(source)])


def test_labs_are_in_step_with_solutions():
    assert notebooks.stale_labs() == []


def test_a_function_body_becomes_a_stub_that_is_not_tried():
    lab = notebooks.lab_from_solution(
        _solution(
            "def f(x):\n    '''Doc.'''\n    ### BEGIN SOLUTION\n    return x\n"
            "    ### END SOLUTION\n\n\ncheck('00.3', f)"
        )
    )
    assert "return x" not in lab.cells[0].source
    assert "    raise NotImplementedError  # your code here" in lab.cells[0].source
    assert notebooks.NOT_COMPARED in lab.cells[0].metadata["tags"]


def test_a_value_goes_back_to_its_dots():
    lab = notebooks.lab_from_solution(
        _solution("n = ...\n### BEGIN SOLUTION\nn = 4\n### END SOLUTION")
    )
    assert lab.cells[0].source == "n = ..."


def test_the_solution_itself_is_left_alone():
    solution = _solution("n = ...\n### BEGIN SOLUTION\nn = 4\n### END SOLUTION")
    before = nbformat.writes(solution)
    notebooks.lab_from_solution(solution)
    assert nbformat.writes(solution) == before


@pytest.mark.parametrize("source", ["### BEGIN SOLUTION\nn = 4", "n = 4\n### END SOLUTION"])
def test_marks_that_do_not_pair_up_are_refused(source):
    with pytest.raises(notebooks.NotebookError, match="pair up"):
        notebooks.lab_from_solution(_solution(source))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_committed_notebooks_are_executed_and_clean(path):
    notebook = notebooks.read(path)
    text = path.read_text()
    assert "widget-state" not in text
    assert "widget-view" not in text
    assert not re.search(r"/(home|root|Users|tmp)/", text)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count, f"cell {cell.id} was not executed"
            assert "execution" not in cell.metadata, "timestamps"
            assert not [o for o in cell.outputs if o.output_type == "error"]
            assert not [o for o in cell.outputs if o.get("name") == "stderr"]


def test_every_check_in_a_lab_has_its_exercise():
    from kvlab.exercises import load_all

    for path in (ROOT / "solutions").glob("*.ipynb"):
        source = "\n".join(c.source for c in notebooks.read(path).cells if c.cell_type == "code")
        used = set(re.findall(r'^check\("([\d.]+)"', source, re.MULTILINE))
        number = path.name[:2]
        assert used == {e for e in load_all() if e.startswith(number)}


def test_a_notebook_that_names_this_machine_is_not_written(tmp_path):
    with pytest.raises(notebooks.NotebookError, match="of this machine"):
        notebooks.write(_solution(f"open('{ROOT}/x')"), tmp_path / "x.ipynb")
    assert not (tmp_path / "x.ipynb").exists()


def test_copies_are_made_once_and_never_overwritten(tmp_path):
    mine = tmp_path / "my"
    assert notebooks.copy_labs(mine)
    copy = next(mine.glob("*.ipynb"))
    assert not any(cell.get("outputs") for cell in notebooks.read(copy).cells)
    copy.write_text("my work")
    assert notebooks.copy_labs(mine) == []
    assert copy.read_text() == "my work"


def test_unknown_notebook_lists_those_there_are():
    with pytest.raises(notebooks.NotebookError, match="labs/00_one_request"):
        notebooks.find("labs/77")


def _nbval(path, **variables):
    # The file lies outside the checkout, so the root's conftest.py has to be named.
    options = ["--nbval", "-p", "conftest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_nbval_sees_a_changed_engine_number(tmp_path):
    """One number that the lab's engine cell printed is changed; nbval must fail on that cell.

    The lab is cut down to the cells that need no server, so that this takes seconds:
    minikv is the engine that prints the number.
    """
    lab = notebooks.read(ROOT / "labs" / "00_one_request.ipynb")
    lab.cells = [c for c in lab.cells if c.id in ("imports", "ex1", "measure")]
    path = tmp_path / "lab.ipynb"
    path.write_text(nbformat.writes(lab))
    unchanged = _nbval(path)
    assert unchanged.returncode == 0, unchanged.stdout

    measure = next(c for c in lab.cells if c.id == "measure")
    changed = json.loads(json.dumps(measure.outputs[0]).replace("1800", "1801"))
    assert changed != measure.outputs[0]
    measure.outputs = [nbformat.from_dict(changed)]
    path.write_text(nbformat.writes(lab))
    result = _nbval(path)
    assert result.returncode == 1
    assert "1801" in result.stdout


def test_strict_nbval_grades_a_learners_copy(tmp_path):
    """The README's command: an open or wrong exercise fails, a right one passes.

    The copy is cut down to the first exercise, which needs no engine.
    """
    lab = notebooks.read(ROOT / "labs" / "00_one_request.ipynb")
    lab.cells = [c for c in lab.cells if c.id in ("imports", "ex1")]
    path = tmp_path / "mine.ipynb"
    exercise = lab.cells[-1]
    stub = 'token_forwards = {"without cache": ..., "with cache": ...}'
    assert stub in exercise.source
    open_source = exercise.source
    for answer, code in (
        (stub, 1),
        ('token_forwards = {"without cache": 1800, "with cache": 85}', 1),
        ('token_forwards = {"without cache": 1800, "with cache": 84}', 0),
    ):
        exercise.source = open_source.replace(stub, answer)
        path.write_text(nbformat.writes(lab))
        result = _nbval(path, KVLAB_STRICT="1")
        assert result.returncode == code, result.stdout
        assert ("NotPassed" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    "disarm",
    [
        lambda cell: cell.update(source="# " + cell.source.replace("\n", "\n# ")),
        lambda cell: cell.metadata.update(tags=["nbval-skip"]),
        lambda cell: cell.metadata.update(tags=["raises-exception"]),
        lambda cell: cell.metadata.update(tags=["nbval-raises-exception"]),
        lambda cell: cell.update(source="# NBVAL_SKIP\n" + cell.source),
        lambda cell: cell.update(source=cell.source + "  #NBVAL_RAISES_EXCEPTION"),
        lambda cell: cell.update(source="%%script false\n" + cell.source),
        lambda cell: cell.update(source=f"text = '''{cell.source}'''"),
        lambda cell: cell.update(source="if False:\n    check('00.1', 0)"),
    ],
)
@pytest.mark.parametrize("name", ["00_one_request.ipynb", "00_one_request-Copy1.ipynb"])
def test_a_copy_without_a_check_is_not_graded_as_done(tmp_path, name, disarm):
    lab = notebooks.read(ROOT / "labs" / "00_one_request.ipynb")
    first = next(cell for cell in lab.cells if cell.id == "ex1")
    first.source = first.source.replace('check("00.1", ', "%time 1\ncheck(\n    '00.1',\n    ")
    path = tmp_path / name
    path.write_text(nbformat.writes(lab))
    assert notebooks.unchecked(path) == []
    disarm(next(cell for cell in lab.cells if cell.id == "ex1"))
    path.write_text(nbformat.writes(lab))
    assert notebooks.unchecked(path) == ["00.1"]


def test_what_a_learners_own_cells_print_is_not_graded(tmp_path):
    path = tmp_path / "mine.ipynb"
    cell = new_code_cell("import time\nprint(time.time_ns())")
    cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text="1\n")], 1
    path.write_text(nbformat.writes(new_notebook(cells=[cell])))
    assert _nbval(path).returncode == 1
    assert _nbval(path, KVLAB_STRICT="1").returncode == 0


def test_what_was_printed_in_pieces_is_stored_in_one():
    def printed(text, name="stdout"):
        return nbformat.v4.new_output("stream", name=name, text=text)

    shown = nbformat.v4.new_output("display_data", {"text/plain": "x"})
    pieces = [printed("a"), printed("b\n"), shown, printed("c"), printed("d", "stderr")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=pieces)])
    notebooks.tidy(notebook)
    outputs = notebook.cells[0].outputs
    assert [o.get("text") for o in outputs] == ["ab\n", None, "c", "d"]
