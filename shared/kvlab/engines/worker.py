"""A program of `kvlab.inside` under an engine's own Python, called like an object.

The notebook's Python cannot import an engine: their pins exclude each other. So a small program
runs under the engine's Python and answers calls. They go through a Unix socket in the run's own
folder (mode 0700), a line of JSON each way; `kvlab.inside.calls` is the other end.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from kvlab.engines.process import Supervised, System
from kvlab.engines.protocol import EngineError
from kvlab.inside import calls


class Refused(EngineError):
    """The program answered a call with an error; `kind` is the class's name there."""

    def __init__(self, message: str, kind: str, log: Path) -> None:
        super().__init__(message, log)
        self.kind = kind


class Worker(System):
    """A program of kvlab.inside. A derived class sets `name`, `_program` and `_environment_name`.

    It is ready when it answers on its socket, which is when it has imported what it needs.
    """

    name = "worker"
    _program = ""
    """The module in kvlab.inside."""
    _port_names: tuple[str, ...] = ()

    def __init__(self, of: str = "", *, deadline: float = 120) -> None:
        super().__init__(of, deadline=deadline)
        self._socket: socket.socket | None = None
        self._calling = threading.Lock()

    def _begin(self) -> None:
        """Make the first calls to a program that has just started; if one fails, it is stopped."""

    def _start(self) -> None:
        super()._start()
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise

    def _command(self) -> list[str]:
        return [str(self._python), "-P", "-m", f"kvlab.inside.{self._program}"]

    def _is_ready(self, run: Supervised) -> bool:
        if self._socket is None:
            place = run.folder / calls.SOCKET
            if not place.exists():
                return False
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(os.fspath(place))
            except OSError:  # bound, and not yet listening
                line.close()
                return False
            self._socket = line
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, function: str, *, timeout: float = 120, **arguments: Any) -> Any:
        """What the program's function gives; arguments and result are JSON, or bytes.

        Raises Refused with what the function raised, EngineError if the program ended, or if
        there was no answer in `timeout` seconds: it is stopped then, for an answer that comes
        late would be taken for the next one.
        """
        if not 0 < timeout <= 86_400:
            raise EngineError(
                f"A timeout is a number of seconds above 0, up to a day, and not {timeout}."
            )
        with self._calling:
            if self._socket is None:
                raise EngineError(f"{self.name} is stopped. Start it again with restart().")
            try:
                message = calls.packed({"call": function, "arguments": arguments})
            except (TypeError, ValueError) as error:
                raise EngineError(f"{self.name} cannot be asked that: {error}.") from None
            try:
                self._socket.settimeout(timeout)
                self._socket.sendall(message)
                answer = calls.receive(self._socket)
            except TimeoutError:
                self.stop()
                raise EngineError(
                    f"{self.name} gave no answer to {function} for {timeout:g} s and was "
                    f"stopped. restart() starts it anew. Its log: {self.log}",
                    self.log,
                ) from None
            except (OSError, EOFError, json.JSONDecodeError) as error:
                if self._has_ended():
                    raise self._ended(f"ended during {function}") from None
                self.stop()
                raise EngineError(
                    f"{self.name} broke off during {function} ({error}) and was stopped. "
                    f"Its log: {self.log}",
                    self.log,
                ) from error
            except BaseException:  # Ctrl-C: as with an answer that comes late
                self.stop()
                raise
        if "error" in answer:
            said = f"{answer['kind']}: {answer['error']}"
            raise Refused(f"{self.name} refused {function}: {said}", answer["kind"], self.log)
        return answer["result"]
