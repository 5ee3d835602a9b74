"""A program under another Python is called like an object, and tells what went wrong."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_help import within

from kvlab.engines.protocol import EngineError
from kvlab.engines.worker import Refused, Worker
from kvlab.inside import calls
from kvlab.paths import ROOT


def main() -> None:
    def fail(text: str) -> None:
        raise LookupError(text)

    def interrupt(pid: int) -> None:
        os.kill(pid, signal.SIGINT)
        time.sleep(60)

    def end(code: int) -> None:
        print("RuntimeError: the moon is full", file=sys.stderr)
        os._exit(code)

    calls.serve(
        {
            "double": lambda value: value * 2,
            "fail": fail,
            "end": end,
            "interrupt": interrupt,
            "odd": lambda: object(),
            "print": lambda text: print(text * 1000),
            "many": lambda count: bytes(count),
        }
    )


class Calculator(Worker):
    name = "calculator"
    grace = 0.5

    def _command(self) -> list[str]:
        return [sys.executable, __file__]

    def _variables(self, folder: Path) -> dict[str, str]:
        return os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "shared")}


@pytest.fixture
def calculator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calculator]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("KVLAB_CACHE", folder)
        with Calculator() as worker:
            yield worker.start()
        assert list((Path(folder) / "tmp").iterdir()) == []


def test_values_and_bytes_come_and_go(calculator: Calculator) -> None:
    for value in (2, "ä", b"\0\xff", [b"a", {"base64": "no"}, None]):
        assert calculator.call("double", value=value) == value * 2
    assert calculator.call("many", count=5_000_000) == bytes(5_000_000)


def test_an_error_is_told_and_the_next_call_works(calculator: Calculator) -> None:
    with pytest.raises(
        Refused, match="calculator refused fail: LookupError: nothing there"
    ) as error:
        calculator.call("fail", text="nothing there")
    assert error.value.kind == "LookupError"
    assert "nothing there" in calculator.log.read_text()  # with its traceback
    for wrong in (("nosuch", {}), ("double", {"no": 1}), ("odd", {})):
        with pytest.raises(Refused):
            calculator.call(wrong[0], **wrong[1])
    assert calculator.call("double", value=3) == 6
    assert calculator.call("print", text="noise\n") is None  # it goes to the log
    assert calculator.call("double", value=4) == 8


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_no_time_is_refused(calculator: Calculator, timeout: float) -> None:
    with pytest.raises(EngineError, match="above 0"):
        calculator.call("double", value=1, timeout=timeout)
    assert calculator.call("double", value=1) == 2


def test_one_that_ends_says_why(calculator: Calculator) -> None:
    with pytest.raises(EngineError, match=r"ended during end: exit status 3") as error:
        calculator.call("end", code=3)
    assert "the moon is full" in str(error.value)
    with pytest.raises(EngineError, match="is stopped"):
        calculator.call("double", value=1)
    calculator.restart()
    assert calculator.call("double", value=1) == 2


def test_one_that_is_killed_or_frozen(calculator: Calculator) -> None:
    os.kill(calculator.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="killed by signal 9"):
        calculator.call("double", value=1)
    calculator.restart()
    os.kill(calculator.pid, signal.SIGSTOP)
    with pytest.raises(EngineError, match="no answer to double for"):
        calculator.call("double", value=1, timeout=0.3)
    assert not calculator.is_alive


def test_calls_of_several_threads_do_not_mix(calculator: Calculator) -> None:
    wrong = []

    def ask(base: int) -> None:
        for number in range(base, base + 200):
            if calculator.call("double", value=number) != 2 * number:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_ctrl_c_in_a_call_leaves_no_answer_for_the_next(calculator: Calculator) -> None:
    with pytest.raises(KeyboardInterrupt):
        calculator.call("interrupt", pid=os.getpid())
    assert not calculator.is_alive
    calculator.restart()
    assert calculator.call("double", value=5) == 10


def test_nobody_else_can_connect(calculator: Calculator) -> None:
    folder = calculator._begun.folder
    # It goes when the program has taken its one caller in, some moments after the call.
    assert within(10, lambda: not (folder / calls.SOCKET).exists())
    assert folder.stat().st_mode & 0o077 == 0


def test_it_ends_with_its_starter(calculator: Calculator) -> None:
    process = psutil.Process(calculator.pid)
    calculator._disconnect()  # as when the starter is gone
    assert within(10, lambda: not process.is_running())


if __name__ == "__main__":
    main()
