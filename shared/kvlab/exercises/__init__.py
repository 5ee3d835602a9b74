"""The exercises of all labs: one module a lab, named after it.

A module holds READING, the minutes that its chapter takes to read, and a tuple
`EXERCISES`. Each exercise carries its check, its hints and the wrong answers
that its check is tested against.
"""

from __future__ import annotations

import importlib
import pkgutil

from kvlab.check import Exercise


def load_all() -> dict[str, Exercise]:
    """Every exercise of the course by its id, in the order of the course."""
    found: dict[str, Exercise] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for exercise in importlib.import_module(f"{__name__}.{name}").EXERCISES:
            if exercise.id in found:
                raise ValueError(f"two exercises have the id {exercise.id}")
            if unknown := [before for before in exercise.after if before not in found]:
                raise ValueError(f"{exercise.id} comes after {unknown}, which do not come before")
            found[exercise.id] = exercise
    return found


def reading_minutes(lab: str) -> int:
    """How long its chapter takes to read: READING in the lab's module."""
    minutes: int = importlib.import_module(f"{__name__}.lab_{lab}").READING
    return minutes


def find(exercise_id: str) -> Exercise:
    """The exercise of this id. Raises KeyError that names the ids there are."""
    exercises = load_all()
    if exercise_id not in exercises:
        raise KeyError(f"no exercise {exercise_id!r}; there are {', '.join(sorted(exercises))}")
    return exercises[exercise_id]
