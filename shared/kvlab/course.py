"""`kvlab plan` and `kvlab progress`: what to do in the time there is, and what is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvlab import exercises, notebooks
from kvlab.check import Exercise
from kvlab.paths import ROOT, SetupError


@dataclass(frozen=True)
class Item:
    """One line of an agenda: a chapter to read, or an exercise."""

    what: str
    title: str
    kind: str
    minutes: int


def agenda(role: str, minutes: int) -> list[Item]:
    """Chapters and exercises for a role, in the order of the course, while the time lasts.

    An exercise brings those that it comes `after`. One that does not fit any more is left
    out, and a later, shorter one may still come. Raises SetupError for an unknown role.
    """
    known = exercises.load_all()
    roles = sorted({role for exercise in known.values() for role in exercise.roles})
    if role not in roles:
        raise SetupError(f"There is no role {role!r}. There are: {', '.join(roles)}.")
    left, items, planned, read = minutes, list[Item](), set[str](), set[str]()
    for exercise in known.values():
        if role not in exercise.roles or exercise.id in planned:
            continue
        chain = [e for e in _with_before(exercise, known) if e.id not in planned]
        labs = sorted({e.lab for e in chain} - read)
        cost = sum(e.minutes for e in chain) + sum(map(exercises.reading_minutes, labs))
        if cost > left:
            continue
        left -= cost
        for lab in labs:
            items.append(
                Item(f"chapter {lab}", _title(lab), "read", exercises.reading_minutes(lab))
            )
        items += [Item(e.id, e.title, e.kind, e.minutes) for e in chain]
        planned |= {e.id for e in chain}
        read |= set(labs)
    return items


def _with_before(exercise: Exercise, known: dict[str, Exercise]) -> list[Exercise]:
    """An exercise behind all that it comes after."""
    chain: list[Exercise] = []
    for before in exercise.after:
        chain += [e for e in _with_before(known[before], known) if e not in chain]
    return [*chain, exercise]


def _title(lab: str) -> str:
    """The name of a chapter: "one request" for 00."""
    (path,) = (ROOT / "chapters").glob(f"{lab}_*.ipynb")
    return path.stem[len(lab) + 1 :].replace("_", " ")


def print_plan(role: str, hours: float) -> None:
    if not 0 < hours < 1000:
        raise SetupError(f"--hours is how long you have, such as 4, and not {hours:g}.")
    items = agenda(role, round(hours * 60))
    table = Table(title=f"{hours:g} hours for {role}", title_justify="left")
    for column in ("", "what", "kind"):
        table.add_column(column)
    table.add_column("minutes", justify="right")
    table.add_column("in all", justify="right")
    total = 0
    for item in items:
        total += item.minutes
        table.add_row(item.what, item.title, item.kind, str(item.minutes), str(total))
    Console().print(table if items else f"Nothing of {role} fits into {hours:g} hours.")


_VERDICT = re.compile(r"^[○✗✓] (\d\d\.\d+) .*: (not tried|failed|passed)$", re.MULTILINE)


def standing(folder: Path) -> dict[str, str]:
    """The last verdict on each exercise, as the saved notebooks of a folder show it."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.ipynb")):
        for cell in notebooks.read(path).cells:
            for output in cell.get("outputs", ()):
                shown = output.get("data", {}).get("text/plain", "")
                found |= dict(_VERDICT.findall(shown))
    return found


def print_progress(folder: Path) -> None:
    """A table of all exercises with their state in the learner's folder."""
    states = standing(folder)
    table = Table(title=f"As saved in {folder.name}/", title_justify="left")
    for column in ("", "exercise", "minutes", "state"):
        table.add_column(column)
    everything = exercises.load_all().values()
    for exercise in everything:
        state = states.get(exercise.id, "not run")
        table.add_row(exercise.id, exercise.title, str(exercise.minutes), state)
    Console().print(table)
    passed = [e for e in everything if states.get(e.id) == "passed"]
    total = sum(e.minutes for e in everything)
    Console().print(
        f"{len(passed)} of {len(everything)} passed, "
        f"{sum(e.minutes for e in passed)} of {total} minutes."
    )
