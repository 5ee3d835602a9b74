"""Mooncake's Transfer Engine: bytes from the memory of one process into that of another.

    from kvlab.engines import transfer_engine

    with transfer_engine.start(1 << 20) as a, transfer_engine.start(1 << 20) as b:
        a.register(), b.register()
        a.fill(0, b"hello")
        a.write(b, length=5)
        print(b.look(0, 5))

Each end is a process with a buffer. What it registers, peers may write and read without asking it
again (over TCP here; over RDMA it is the network card that does it). There is no token and no
encryption, and **it listens on all interfaces**, also when it is given 127.0.0.1 (seen with
0.3.13.post1): on a machine in an open network, run it behind a firewall.
"""

from __future__ import annotations

from pathlib import Path

from kvlab.engines.mooncake import ENVIRONMENT
from kvlab.engines.protocol import EngineError, whole
from kvlab.engines.worker import Worker


class TransferError(EngineError):
    """A transfer failed; `code` is Mooncake's own."""

    def __init__(self, what: str, code: int, log: Path) -> None:
        super().__init__(f"{what} failed: {code}", log)
        self.code = code


def start(size: int, *, deadline: float = 60) -> TransferEngine:
    """Start one end with a zeroed buffer of `size` bytes. It listens on all interfaces.

    Raises EngineError, or kvlab.environments.EnvironmentMissing.
    """
    return TransferEngine(size, deadline).start()


class TransferEngine(Worker):
    """One end; `start` makes one."""

    name = "Transfer Engine"
    _program = "transfer_engine"
    _environment_name = ENVIRONMENT

    def __init__(self, size: int, deadline: float) -> None:
        super().__init__(f"with {whole('size', size):,} bytes", deadline=deadline)
        self.size = size
        self.address = ""
        """host:port of this end, for peers."""
        self.base = 0
        """Where the buffer begins in this end's own memory: peers name absolute addresses."""

    def _begin(self) -> None:
        opened = self.call("open", size=self.size)
        self.address, self.base = opened["address"], opened["base"]
        self._checked("initialize", opened["code"])

    def register(self) -> None:
        """Let peers write and read the buffer. Raises TransferError."""
        self._checked("register", self.call("register"))

    def unregister(self) -> None:
        self._checked("unregister", self.call("unregister"))

    def fill(self, offset: int, value: bytes) -> None:
        """Put bytes into this end's own buffer."""
        self.call("fill", offset=offset, value=value)

    def look(self, offset: int, length: int) -> bytes:
        """Bytes of this end's own buffer."""
        found: bytes = self.call("look", offset=offset, length=length)
        return found

    def write(
        self, peer: TransferEngine, *, length: int, offset: int = 0, peer_offset: int = 0
    ) -> None:
        """Copy bytes of the own buffer, from `offset` on, into the peer's, from `peer_offset` on.

        Raises TransferError: nothing registered there, out of its range, or the peer is dead.
        """
        remote = peer.base + peer_offset
        code = self.call("write", peer=peer.address, offset=offset, remote=remote, length=length)
        self._checked("write", code)

    def read(
        self, peer: TransferEngine, *, length: int, offset: int = 0, peer_offset: int = 0
    ) -> None:
        """The other way: from the peer's buffer into the own one. Raises TransferError."""
        remote = peer.base + peer_offset
        code = self.call("read", peer=peer.address, offset=offset, remote=remote, length=length)
        self._checked("read", code)

    def _checked(self, what: str, code: int) -> None:
        if code:
            raise TransferError(what, code, self.log)
