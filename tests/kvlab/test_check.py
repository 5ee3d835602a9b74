"""Verdicts: what a check says about right, wrong, open and badly behaved answers."""

import re
import signal
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvlab import check as check_module
from kvlab.check import Exercise, NotPassed, Wrong, check, hint, judge, number, predict
from kvlab.exercises import find, load_all

ALL = load_all()


def _exercise(function):
    return Exercise(
        id="99.1",
        title="A test",
        minutes=1,
        difficulty=1,
        kind="build",
        roles=("backend",),
        check=function,
        hints=("first", "second"),
        wrong=(),
    )


def _double(answer):
    if answer(3) != 6:
        raise Wrong("3 doubled is not that")
    return "doubled"


@pytest.mark.parametrize(
    ("exercise_id", "wrong", "words"),
    [(e.id, wrong, words) for e in ALL.values() for wrong, words in e.wrong],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_plausible_wrong_answers_fail_for_the_right_reason(exercise_id, wrong, words):
    verdict = judge(ALL[exercise_id], wrong)
    assert verdict.state == "failed", verdict
    assert re.search(words, verdict.text, re.IGNORECASE), verdict


@pytest.mark.parametrize(
    ("exercise_id", "right"), [(e.id, right) for e in ALL.values() for right in e.right]
)
def test_unusual_right_answers_pass(exercise_id, right):
    assert judge(ALL[exercise_id], right).state == "passed"


@pytest.mark.parametrize("exercise", ALL.values(), ids=lambda e: e.id)
def test_every_exercise_is_complete(exercise):
    assert len(exercise.wrong) >= 4
    assert exercise.hints
    assert exercise.minutes > 0
    assert exercise.roles


def test_unknown_exercise_names_those_there_are():
    with pytest.raises(KeyError, match=r"00\.1"):
        find("77.7")


@pytest.mark.parametrize("stub", [..., {"a": ..., "b": 1}, [..., ...], (1, ...)])
def test_dots_are_not_tried(stub):
    assert judge(_exercise(_double), stub).state == "not tried"


def test_unwritten_function_is_not_tried():
    def answer(x):
        raise NotImplementedError

    assert judge(_exercise(_double), answer).state == "not tried"


def test_right_answer_passes():
    assert judge(_exercise(_double), lambda x: 2 * x).state == "passed"


def test_exception_becomes_a_verdict():
    verdict = judge(_exercise(_double), lambda x: 1 / 0)
    assert verdict.state == "failed"
    assert "ZeroDivisionError" in verdict.text


def test_system_exit_becomes_a_verdict():
    def answer(x):
        raise SystemExit

    assert judge(_exercise(_double), answer).state == "failed"


def test_endless_loop_is_stopped_even_if_it_swallows_exceptions(monkeypatch):
    monkeypatch.setattr(check_module, "TIME_LIMIT_SECONDS", 1)

    def answer(x):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass

    verdict = judge(_exercise(_double), answer)
    assert verdict.state == "failed"
    assert "still running" in verdict.text


@pytest.mark.parametrize("nap", [0.0, 0.001, 30.0])
def test_not_even_a_bare_except_goes_on_for_ever(monkeypatch, nap):
    monkeypatch.setattr(check_module, "TIME_LIMIT_SECONDS", 1)

    def answer(x):
        while True:
            try:
                time.sleep(nap)
            except:  # noqa: E722
                pass

    began = time.monotonic()
    assert "still running" in judge(_exercise(_double), answer).text
    assert time.monotonic() - began < 25  # and not the half minute that one nap takes
    assert sys.gettrace() is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_an_answer_that_swallows_its_end_and_comes_to_another_fails(monkeypatch):
    monkeypatch.setattr(check_module, "TIME_LIMIT_SECONDS", 1)

    def answer(x):
        try:
            time.sleep(20)
        except:  # noqa: E722
            pass
        return 6

    assert "still running" in judge(_exercise(_double), answer).text


class Unspeakable(BaseException):
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("error", [GeneratorExit, Unspeakable, MemoryError])
def test_whatever_is_raised_becomes_a_verdict(error):
    def answer(x):
        raise error

    assert judge(_exercise(_double), answer).state == "failed"


def test_a_list_that_holds_itself_becomes_a_verdict():
    endless = []
    endless.append(endless)
    assert judge(_exercise(_double), endless).state == "failed"


class Everything(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def test_numbers_are_made_plain():
    assert number(np.int64(3), "it") == 3
    assert number(torch.tensor(3), "it") == 3
    assert number(Fraction(6, 2), "it") == 3
    assert type(number(3.0, "it")) is int
    assert number(2.5, "it") == 2.5
    assert number(Everything(1), "it") != 2
    for wrong in (None, True, "3", float("nan"), float("inf"), 10**5000, [3], object()):
        with pytest.raises(Wrong, match="it "):
            number(wrong, "it")


def test_endless_recursion_becomes_a_verdict():
    def answer(x):
        return answer(x + 1)

    verdict = judge(_exercise(_double), answer)
    assert verdict.state == "failed"


def test_prints_of_an_answer_are_bounded(capsys):
    def answer(x):
        print("y" * 1_000_000)
        return 2 * x

    assert judge(_exercise(_double), answer).state == "passed"
    printed = capsys.readouterr().out
    assert len(printed) < 2 * check_module.PRINT_LIMIT_CHARACTERS
    assert "left out" in printed


def test_a_value_is_judged_on_a_copy():
    def spoil(answer):
        answer["kept"] = False
        return "fine"

    mine = {"kept": True}
    assert judge(_exercise(spoil), mine).state == "passed"
    assert mine == {"kept": True}


def test_check_shows_and_does_not_raise(capsys, monkeypatch):
    monkeypatch.delenv("KVLAB_STRICT", raising=False)
    check("00.1", {"without cache": ..., "with cache": ...})
    assert "not tried" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [..., {"without cache": 1, "with cache": 1}])
def test_strict_raises_for_anything_but_passed(monkeypatch, answer):
    monkeypatch.setenv("KVLAB_STRICT", "1")
    with pytest.raises(NotPassed, match=r"00\.1"):
        check("00.1", answer)


def test_hints_come_in_stages(capsys, monkeypatch):
    monkeypatch.setattr(check_module, "_hints_given", {})
    exercise = find("00.1")
    for _ in range(len(exercise.hints) + 1):
        hint("00.1")
    printed = capsys.readouterr().out
    for text in exercise.hints:
        assert printed.count(text) == 1
    assert "No further hint" in printed


@pytest.mark.parametrize(
    ("guess", "seen", "said"),
    [
        (..., 2190, "n: 2,190 (no guess was written down)"),
        (2190, 2190, "n: 2,190 (as you guessed)"),
        (2190.0, 2190, "n: 2,190 (as you guessed)"),
        (1000, 2190, "n: 2,190 (you guessed 1,000, 2.2 times too little)"),
        (23_040, 1, "n: 1 (you guessed 23,040, 23,040 times too much)"),
        (2189, 2190, "n: 2,190 (you guessed 2,189, almost)"),
        (1e-9, 1, "n: 1 (you guessed 1e-09, a million times too little)"),
        (3, 0, "n: 0 (you guessed 3)"),
        (-2, 5, "n: 5 (you guessed -2)"),
        ("many", 5, "n: 5 (your guess should be a number, and is a str)"),
        (None, 5, "n: 5 (your guess is None: is a `return` missing?)"),
    ],
)
def test_a_guess_is_laid_beside_the_number(guess, seen, said, capsys):
    guesses = predict(n=guess)
    capsys.readouterr()
    guesses.compare("n", seen)
    assert capsys.readouterr().out.strip() == said


def test_open_guesses_are_named_and_unknown_ones_refused(capsys):
    guesses = predict(first=..., second=3)
    assert "Not guessed yet: first\n" in capsys.readouterr().out
    with pytest.raises(KeyError, match="there are first, second"):
        guesses.compare("third", 1)
    predict(first=1, second=3)
    assert "are kept" in capsys.readouterr().out
