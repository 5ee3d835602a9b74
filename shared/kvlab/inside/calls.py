"""Calls between a notebook's process and a program under an engine's own Python.

A message is a line of JSON, with bytes as base64: nothing that comes through a socket is ever
unpickled. Standard library only: this runs under every Python of the course.
"""

from __future__ import annotations

import base64
import json
import operator
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_BYTES = "bytes as base64"
SOCKET = "calls.socket"
"""The socket's name in the folder of the run, which is where the program is started."""


def packed(message: Any) -> bytes:
    """A message as it is sent; bytes in it travel as base64, numpy's numbers as plain ones.

    Raises TypeError for what cannot be sent.
    """
    return json.dumps(message, default=_packed).encode() + b"\n"


def receive(line: socket.socket) -> Any:
    """The next message. Raises EOFError where the other side is gone."""
    pieces = []
    while True:
        piece = line.recv(1 << 20)
        if not piece:
            raise EOFError("the other side is gone")
        pieces.append(piece)
        if piece.endswith(b"\n"):  # one message is answered before the next is sent
            return json.loads(b"".join(pieces), object_hook=_unpacked)


def _packed(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(value).decode()}
    if hasattr(value, "__index__"):  # numpy's whole numbers
        return operator.index(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _unpacked(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if set(value) == {_BYTES} else value


def serve_object(target: object) -> None:
    """Answer calls of an object's public methods; see serve()."""
    names = [name for name in dir(target) if not name.startswith("_")]
    serve({name: f for name in names if callable(f := getattr(target, name))})


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls of these functions until the other side closes. Only one may connect."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(SOCKET)
        door.listen(1)
        line, _ = door.accept()
        Path(SOCKET).unlink()
    with line:
        while True:
            try:
                asked = receive(line)
            except (EOFError, OSError):
                return
            try:
                if asked["call"] not in functions:
                    raise LookupError(f"there is no function {asked['call']}")
                answer = packed({"result": functions[asked["call"]](**asked["arguments"])})
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                answer = packed({"error": str(error), "kind": type(error).__name__})
            line.sendall(answer)
