"""Calls between a notebook's process and a program under an engine's own Python.

A message is a line of JSON, with bytes as base64: nothing that comes through a socket is ever
unpickled. Standard library only: this runs under every Python of the course.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_BYTES = "bytes as base64"
SOCKET = "calls.socket"
"""The socket's name in the folder of the run, which is where the program is started."""


def send(line: socket.socket, message: Any) -> None:
    """Send one message; bytes in it travel as base64."""
    text = json.dumps(message, default=_packed)
    line.sendall(text.encode() + b"\n")


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
                answer = {"result": functions[asked["call"]](**asked["arguments"])}
                text = json.dumps(answer, default=_packed)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                text = json.dumps({"error": str(error), "kind": type(error).__name__})
            line.sendall(text.encode() + b"\n")
