"""Agendas fit the time and hold what an exercise builds on; progress is what was saved."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from kvlab import course, exercises, notebooks
from kvlab.check import Exercise
from kvlab.paths import ROOT, SetupError


def exercise(id, minutes=10, roles=("backend",), after=()):
    return Exercise(
        id=id,
        title=f"Exercise {id}",
        minutes=minutes,
        difficulty=1,
        kind="build",
        roles=roles,
        check=lambda answer: "",
        hints=("think",),
        wrong=(),
        after=after,
    )


@pytest.fixture
def small(monkeypatch):
    """A course of four exercises whose chapters take 5 minutes each."""
    made = [
        exercise("00.1", roles=("kernel",)),
        exercise("00.2"),
        exercise("01.1", minutes=40),
        exercise("01.2", minutes=5, roles=("backend", "kernel"), after=("00.1",)),
    ]
    monkeypatch.setattr(exercises, "load_all", lambda: {e.id: e for e in made})
    monkeypatch.setattr(exercises, "reading_minutes", lambda lab: 5)
    monkeypatch.setattr(course, "_title", lambda lab: f"title of {lab}")


@pytest.mark.parametrize(
    ("role", "minutes", "agenda"),
    [
        ("backend", 999, "chapter 00, 00.2, chapter 01, 01.1, 00.1, 01.2"),
        # The long one does not fit, what comes after it does.
        ("backend", 35, "chapter 00, 00.2, chapter 01, 00.1, 01.2"),
        ("backend", 20, "chapter 00, 00.2"),
        ("backend", 14, ""),
        ("kernel", 999, "chapter 00, 00.1, chapter 01, 01.2"),
    ],
)
def test_an_agenda_fits_and_brings_what_comes_before(small, role, minutes, agenda):
    items = course.agenda(role, minutes)
    assert ", ".join(item.what for item in items) == agenda
    assert sum(item.minutes for item in items) <= minutes


def test_an_unknown_role_lists_those_there_are(small):
    with pytest.raises(SetupError, match=r"no role 'cook'\. There are: backend, kernel"):
        course.agenda("cook", 60)


def test_the_course_as_it_is_has_something_for_every_role():
    for role in {role for e in exercises.load_all().values() for role in e.roles}:
        items = course.agenda(role, 8 * 60)
        assert items
        assert sum(item.minutes for item in items) <= 8 * 60
    assert course.agenda("backend", 60) != course.agenda("backend", 8 * 60)


def test_progress_is_what_the_saved_notebooks_show(tmp_path, capsys):
    def shown(text):
        return new_code_cell(outputs=[new_output("display_data", {"text/plain": text})])

    cells = [
        shown("✓ 00.1 Count the token-forwards: passed\n  100 + ..."),
        shown("✗ 00.2 KV bytes per token: failed\n  half of what it should be: passed on"),
        new_code_cell(outputs=[new_output("stream", text="✓ 00.3 Mine: passed\n")]),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "00_one_request.ipynb")
    assert course.standing(tmp_path) == {"00.1": "passed", "00.2": "failed"}
    course.print_progress(tmp_path)
    assert f"1 of {len(exercises.load_all())} passed" in capsys.readouterr().out


def test_reset_keeps_the_old_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "labs").symlink_to(ROOT / "labs")
    assert notebooks.reset("00") == (tmp_path / "my" / "00_one_request.ipynb", None)
    fresh = (tmp_path / "my" / "00_one_request.ipynb").read_text()
    for number in (1, 2):
        (tmp_path / "my" / "00_one_request.ipynb").write_text(f"work {number}")
        mine, kept = notebooks.reset("00")
        assert kept == tmp_path / "my" / f"00_one_request.old-{number}.ipynb"
        assert kept.read_text() == f"work {number}"
        assert mine.read_text() == fresh
    for wrong in ("77", ""):
        with pytest.raises(notebooks.NotebookError, match="names no lab; there are 00"):
            notebooks.reset(wrong)
