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

A chapter asks for guesses before it shows a number: `predict` keeps them, and
`Predictions.compare` lays the number beside the guess. Nothing is graded there.
"""

from __future__ import annotations

import contextlib
import copy
import html
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

TIME_LIMIT_SECONDS = 10
PRINT_LIMIT_CHARACTERS = 2_000
_LONGEST_VERDICT = 2_000
"""Characters: an error may carry megabytes."""

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
    wrong: Sequence[tuple[Any, str]]
    """Answers that people plausibly give and that must fail, each with words of its verdict."""
    right: Sequence[Any] = ()
    """Right answers in a form of their own; the usual one is in the solution."""
    after: tuple[str, ...] = ()
    """Ids of exercises without which this one makes no sense."""

    @property
    def lab(self) -> str:
        """The lab's number, such as "00"."""
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Verdict:
    state: Literal["not tried", "failed", "passed"]
    text: str


_UNTRIED = Verdict("not tried", "replace the dots with your answer, then run this cell again")


def number(value: Any, what: str) -> int | float:
    """A learner's number as a plain one: an int where it is whole, else a float.

    Takes what computes like a number (numpy, torch, Fraction); raises `Wrong` that
    names `what` for all else, NaN and infinity among it.
    """
    if value is ...:
        raise NotImplementedError
    if value is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        # By the base classes' own methods: a subclass could call itself equal to anything.
        plain = int.__add__(value, 0) if isinstance(value, int) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise Wrong(f"{what} should be a number, and is a {type(value).__name__}") from None
    if not -(10**18) < plain < 10**18:  # NaN, infinity, or more digits than anyone reads
        raise Wrong(f"{what} is no number that could be")
    return int(plain) if plain == int(plain) else plain


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
    """The verdict on an answer. Never raises what the answer raises, but Ctrl-C.

    The check works on a copy of a value, calls a function with arguments it
    made for that call, holds back what it prints, and is stopped after
    TIME_LIMIT_SECONDS.
    """
    try:
        with _captured_prints(), _time_limit(TIME_LIMIT_SECONDS):
            if is_stub(answer):
                return _UNTRIED
            if not callable(answer):
                answer = copy.deepcopy(answer)
            return Verdict("passed", exercise.check(answer))
    except NotImplementedError:
        return Verdict(
            "not tried",
            "write the function (and delete its line `raise NotImplementedError`), then run this "
            "cell again",
        )
    except Wrong as wrong:
        return Verdict("failed", str(wrong)[:_LONGEST_VERDICT])
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and whatever else a learner's code may raise
        said = f"your code raised {_said(error)}"[:_LONGEST_VERDICT]
        return Verdict("failed", said + _where(error))


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


class Predictions:
    """Guesses by name, made before the numbers are seen; made by `predict`."""

    def __init__(self, guesses: Mapping[str, Any]) -> None:
        self._guesses = dict(guesses)

    def compare(self, name: str, seen: float) -> None:
        """Print the number that was seen, and how far from it the guess was.

        Raises KeyError that lists the guesses, for a name that is none of them.
        """
        if name not in self._guesses:
            raise KeyError(f"no guess is called {name!r}; there are {', '.join(self._guesses)}")
        guess = self._guesses[name]
        if guess is ...:
            said = "no guess was written down"
        else:
            try:
                said = _how_far(number(guess, "your guess"), seen)
            except Wrong as reason:
                said = str(reason)
        print(f"{name}: {seen:,} ({said})")


def predict(**guesses: Any) -> Predictions:
    """Keep guesses, each under a name of its own; `...` stands for one that is not made yet."""
    open_ones = [name for name, guess in guesses.items() if guess is ...]
    if open_ones:
        print("Not guessed yet:", ", ".join(open_ones))
        print("Write a number over the dots and run this cell again, before you read on.")
    else:
        print("Your guesses are kept until this notebook's kernel ends.")
    return Predictions(guesses)


def _how_far(guess: float, seen: float) -> str:
    said = f"you guessed {guess:,}"
    if guess == seen:
        return "as you guessed"
    if guess * seen <= 0:  # no ratio says anything
        return said
    ratio = max(guess / seen, seen / guess)
    if ratio < 1.05:
        return f"{said}, almost"
    times = f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}" if ratio < 1e6 else "a million"
    return f"{said}, {times} times too {'much' if guess > seen else 'little'}"


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

    active, alarms = True, 0

    def up(_signal: int, frame: FrameType | None) -> None:
        nonlocal alarms
        if not active:
            return
        alarms += 1
        if alarms == 200:
            print("This code cannot be stopped: restart the kernel (0, 0).", file=sys.stderr)
        if alarms % 2:
            raise _TimeUp
        # A bare `except:` in a loop has caught the last one. Raised not here but at the next
        # line, it comes up outside of that `try` sooner or later.
        while frame is not None:
            frame.f_trace = trace
            frame = frame.f_back
        sys.settrace(trace)

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code is up.__code__:
            return None
        if event == "line":
            raise _TimeUp
        return trace

    before = signal.signal(signal.SIGALRM, up)
    traced = sys.gettrace()
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        yield
        if alarms:  # the code caught what should have ended it, and came to an end even so
            raise _TimeUp
    finally:
        active = False
        sys.settrace(traced)
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


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # its own __str__ fails
        return type(error).__name__


def _where(error: BaseException) -> str:
    """The last line of the learner's own cell in a traceback, if there is one."""
    import traceback

    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython")
    ]
    return f" (line {lines[-1].lineno} of your cell: {lines[-1].line})" if lines else ""
