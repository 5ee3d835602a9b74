"""One end of a Mooncake Transfer Engine: a process with memory that peers may write and read.

Run under a Python that has mooncake-transfer-engine by `kvlab.engines.transfer_engine`. The class
is mooncake.engine.TransferEngine 0.3.13.post1.
"""

from __future__ import annotations

import ctypes
import os

from mooncake.engine import TransferEngine

from kvlab.inside import calls

engine = TransferEngine()
memory = ctypes.create_string_buffer(1)


def open(size: int) -> dict[str, int | str]:
    """Begin, with a zeroed buffer of so many bytes that is not registered yet."""
    global memory
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    memory = ctypes.create_string_buffer(size)
    address = f"127.0.0.1:{engine.get_rpc_port()}"
    return {"code": code, "address": address, "base": ctypes.addressof(memory)}


def register() -> int:
    """Let peers reach the buffer; 0, or a negative code."""
    return engine.register_memory(ctypes.addressof(memory), len(memory))


def unregister() -> int:
    return engine.unregister_memory(ctypes.addressof(memory))


def _own(offset: int, length: int) -> int:
    """The address of a part of the own buffer. Raises ValueError where it is not all inside."""
    if not (0 <= offset and 0 <= length <= len(memory) - offset):
        raise ValueError(f"the buffer has {len(memory)} bytes")
    return ctypes.addressof(memory) + offset


def fill(offset: int, value: bytes) -> None:
    """Put bytes into this side's own buffer."""
    ctypes.memmove(_own(offset, len(value)), bytes(value), len(value))  # a str is none


def look(offset: int, length: int) -> bytes:
    """Bytes of this side's own buffer."""
    return ctypes.string_at(_own(offset, length), length)


def write(peer: str, offset: int, remote: int, length: int) -> int:
    """Copy from the own buffer to an address in a peer's memory; 0, or a negative code."""
    return engine.transfer_sync_write(peer, _own(offset, length), remote, length)


def read(peer: str, offset: int, remote: int, length: int) -> int:
    """Copy from an address in a peer's memory to the own buffer; 0, or a negative code."""
    return engine.transfer_sync_read(peer, _own(offset, length), remote, length)


if __name__ == "__main__":
    calls.serve({f.__name__: f for f in (open, register, unregister, fill, look, write, read)})
    os._exit(0)  # its threads would otherwise go on for some seconds
