"""Exercises that check themselves.

A lab cell ends with `check("00.1", answer)`. The verdict is one of

    not tried    the answer is still the stub
    failed       what is wrong, and why it matters; never the answer itself
    passed       with one sentence worth keeping

and it is *shown*, not raised, so that the cells after it run whatever the state
of the exercises. `KVLAB_STRICT=1` turns a verdict other than passed into an
exception: `KVLAB_STRICT=1 pytest --nbval my/00*` grades a learner's work.

An `Exercise` is data and one function. The function gets the answer (a value,
or the learner's function) and returns the sentence for a right one, or raises
`Wrong` with the reason. Beside it stands the list of wrong answers that people
plausibly give; a test feeds each of them to the check and wants a failure.
"""

from __future__ import annotations

import contextlib
import copy
import html
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TIME_LIMIT_SECONDS = 10
PRINT_LIMIT_CHARACTERS = 2_000

Kind = Literal["predict", "measure", "build", "break", "explain"]


class Wrong(Exception):
    """Raised by a check: the answer was tried and is not right. The text is shown."""


class NotPassed(AssertionError):
    """Raised by `check` under KVLAB_STRICT=1 for any verdict but passed."""


class _TimeUp(BaseException):
    """Not an Exception, so that a learner's `except Exception:` cannot swallow it."""


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab; `id` is the lab's number and its own, such as "00.2"."""

    id: str
    title: str
    minutes: int
    difficulty: Literal[1, 2, 3]
    kind: Kind
    roles: tuple[str, ...]
    check: Callable[[Any], str]
    hints: tuple[str, ...]
    wrong: Sequence[Any]
    """Answers that people plausibly give and that must fail."""


@dataclass(frozen=True)
class Verdict:
    state: Literal["not tried", "failed", "passed"]
    text: str


def is_stub(answer: Any) -> bool:
    """Whether an answer still holds the dots that the lab came with.

    A function that was not written yet raises NotImplementedError when called;
    `judge` takes that for not tried as well.
    """
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, (list, tuple)):
        return any(is_stub(part) for part in answer)
    return answer is ...


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """The verdict on an answer. Never raises what the answer raises.

    The check works on a copy of a value, calls a function with arguments it
    made for that call, swallows what it prints, and is stopped after
    TIME_LIMIT_SECONDS.
    """
    if is_stub(answer):
        return Verdict("not tried", "replace the dots with your answer, then run this cell again")
    try:
        if not callable(answer):
            answer = copy.deepcopy(answer)
        with _time_limit(TIME_LIMIT_SECONDS), _captured_prints():
            return Verdict("passed", exercise.check(answer))
    except NotImplementedError:
        return Verdict("not tried", "write the function, then run this cell again")
    except Wrong as wrong:
        return Verdict("failed", str(wrong))
    except _TimeUp:
        return Verdict(
            "failed",
            f"it was still running after {TIME_LIMIT_SECONDS} seconds and was stopped. "
            "Look for a loop whose condition never turns false.",
        )
    except RecursionError:
        return Verdict("failed", "your function calls itself without end (RecursionError)")
    except MemoryError:
        return Verdict("failed", "your function asked for more memory than this machine has")
    except (Exception, SystemExit) as error:
        return Verdict("failed", f"your code raised {type(error).__name__}: {error}{_where(error)}")


def check(exercise_id: str, answer: Any) -> None:
    """Show the verdict on an answer to the exercise of this id, such as "00.1".

    Raises KeyError for an id that no lab has, and `NotPassed` only under
    KVLAB_STRICT=1.
    """
    from kvlab.exercises import find

    exercise = find(exercise_id)
    verdict = judge(exercise, answer)
    _show(exercise, verdict)
    if verdict.state != "passed" and os.environ.get("KVLAB_STRICT") == "1":
        raise NotPassed(f"{exercise.id} {verdict.state}: {verdict.text}")


def hint(exercise_id: str) -> None:
    """Print the next hint of an exercise; each call goes one step further."""
    from kvlab.exercises import find

    exercise = find(exercise_id)
    given = _hints_given.get(exercise_id, 0)
    if given == len(exercise.hints):
        print(f"No further hint: the solution is in solutions/{exercise_id[:2]}_*.ipynb.")
        return
    _hints_given[exercise_id] = given + 1
    print(f"Hint {given + 1} of {len(exercise.hints)}: {exercise.hints[given]}")


_hints_given: dict[str, int] = {}
_MARKS = {"not tried": "○", "failed": "✗", "passed": "✓"}


def _show(exercise: Exercise, verdict: Verdict) -> None:
    from IPython.display import display

    head = f"{_MARKS[verdict.state]} {exercise.id} {exercise.title}: {verdict.state}"
    tail = f' (stuck? run hint("{exercise.id}"))' if verdict.state == "failed" else ""
    # The left edge repeats the state as a line style, for readers without colour.
    edge = {"not tried": "dotted", "failed": "dashed", "passed": "solid"}[verdict.state]
    box = (
        f'<div role="status" style="border-left: 4px {edge} currentColor; padding: 2px 10px">'
        f"<b>{html.escape(head)}</b><br>{html.escape(verdict.text + tail)}</div>"
    )
    display({"text/plain": f"{head}\n  {verdict.text}{tail}", "text/html": box}, raw=True)


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Interrupt the block after `seconds`, where signals can: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def up(_signal: int, _frame: Any) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Bounded(io.StringIO):
    """Keeps the first characters of what is printed and drops the rest."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, PRINT_LIMIT_CHARACTERS - self.tell())])
        return len(text)


@contextlib.contextmanager
def _captured_prints() -> Iterator[None]:
    """Hold back what the learner's function prints; show a bounded part of it."""
    printed = _Bounded()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        if text := printed.getvalue():
            print(text, end="" if text.endswith("\n") else "\n")
            if len(text) >= PRINT_LIMIT_CHARACTERS:
                print("[the rest of what your function printed is left out]")


def _where(error: BaseException) -> str:
    """The last line of the learner's own cell in a traceback, if there is one."""
    import traceback

    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython")
    ]
    return f" (line {lines[-1].lineno} of your cell: {lines[-1].line})" if lines else ""
