"""Mooncake Store: a master that knows where objects are, and clients that hold and use them.

    from kvlab.engines import mooncake

    with mooncake.start() as master, master.client(segment_bytes=64 << 20) as store:
        store.put("a", b"hello")
        print(store.get("a"), store.replicas("a"))

vLLM uses the store through a connector, its own or the course's:

    from kvlab.engines import vllm, vllm_connectors

    vllm.start(connector=vllm_connectors.to_mooncake(master))  # or to_store(master)

The master moves no bytes: clients lend memory (a *segment*) and copy from one another's, here over
TCP. Checked against mooncake-transfer-engine 0.3.13.post1, whose flags `mooncake_master --help`
lists. Master and metrics listen on loopback. A client's Transfer Engine listens on all interfaces,
also when it is given 127.0.0.1: see `kvlab.engines.transfer_engine`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kvlab.engines import room
from kvlab.engines.process import Supervised
from kvlab.engines.protocol import EngineError, whole
from kvlab.engines.server import Server
from kvlab.engines.worker import Worker

ENVIRONMENT = "vllm"
"""Whose Python has mooncake: vLLM's environment, for its connectors use it too."""

# mooncake-store/include/types.h, enum class ErrorCode: those that a client meets, and their cause.
CODES = {
    -103: "CLIENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE: no segment has room for it (eviction runs behind; try again)",
    -600: "INVALID_PARAMS: an empty or too large value, no replica, a segment of an odd size",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE: somebody has read it just now",
    -707: "LEASE_EXPIRED: it took longer to copy than it is kept for a reader",
    -800: "TRANSFER_FAIL: whoever holds it does not answer",
    -900: "RPC_FAIL: the master does not answer",
    -901: "RPC_TIMEOUT: the master does not answer",
}


class StoreError(EngineError):
    """The store refused; `code` is Mooncake's own."""

    def __init__(self, what: str, code: int, log: Path) -> None:
        super().__init__(f"{what}: {code}, {CODES.get(code, 'see types.h')}", log)
        self.code = code


def start(
    *,
    lease_ms: int = 2000,
    client_ttl_seconds: int = 10,
    port: int | None = None,
    deadline: float = 60,
) -> Master:
    """Start a master and return it when it answers.

    lease_ms: how long an object stays for whoever has just read it; client_ttl_seconds: how long a
    silent client counts as alive. `port` is that of its RPC; it asks for no key. Its clients lend
    their memory on all interfaces. Raises EngineError, or kvlab.environments.EnvironmentMissing.
    """
    return Master(
        lease_ms=lease_ms,
        client_ttl_seconds=client_ttl_seconds,
        port=port,
        deadline=deadline,
    ).start()


class Master(Server):
    """The process that knows which client holds which object; `start` makes one."""

    name = "Mooncake master"
    _environment_name = ENVIRONMENT
    _port_names = ("rpc", "http")
    _health = "/health"
    _metrics_prefix = "master_"

    def __init__(
        self,
        *,
        lease_ms: int,
        client_ttl_seconds: int,
        port: int | None,
        deadline: float,
    ) -> None:
        super().__init__(port=port, deadline=deadline)
        self._flags = [
            f"--default_kv_lease_ttl={whole('lease_ms', lease_ms)}",
            f"--client_ttl={whole('client_ttl_seconds', client_ttl_seconds)}",
        ]

    def _command(self) -> list[str]:
        return [
            *(str(self._python), "-m", "mooncake.cli"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.ports['rpc']}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.ports['http']}",
            "--rpc_thread_num=2",
            "--logtostderr=true",
            "--enable_metric_reporting=false",
            *self._flags,
        ]

    def _is_ready(self, run: Supervised) -> bool:
        return super()._is_ready(run) and self._listens(run, self.ports["rpc"])

    @property
    def address(self) -> str:
        """host:port of its RPC, for clients and connectors."""
        return f"127.0.0.1:{self.ports['rpc']}"

    def client(
        self, *, segment_bytes: int = 64 << 20, buffer_bytes: int = 16 << 20, deadline: float = 120
    ) -> Store:
        """Start a client in a process of its own.

        It lends the store `segment_bytes` (0: it only uses the store), and copies through
        `buffer_bytes`. Raises EngineError.
        """
        return Store(self, segment_bytes, buffer_bytes, deadline).start()


class Replica(NamedTuple):
    """Where one copy of an object lies."""

    endpoint: str
    """The `endpoint` of the client that holds it."""
    bytes: int


class Store(Worker):
    """A client of the store; `Master.client` makes one.

    stop() leaves as a client should; kill its process (`pid`), and it leaves as on a bad day: the
    master learns of it after `client_ttl_seconds`.
    """

    name = "Mooncake client"
    _program = "mooncake_store"
    _environment_name = ENVIRONMENT

    def __init__(
        self, master: Master, segment_bytes: int, buffer_bytes: int, deadline: float
    ) -> None:
        segment_bytes = whole("segment_bytes", segment_bytes, least=0)
        buffer_bytes = whole("buffer_bytes", buffer_bytes)
        super().__init__(f"with {segment_bytes >> 20} MiB", deadline=deadline)
        self._master = master
        self._bytes = {"segment_bytes": segment_bytes, "buffer_bytes": buffer_bytes}
        self.segment = ""
        """host:port, under which put() and the master know what this client lends."""
        self.endpoint = ""
        """host:port at which its bytes are read and written; replicas() names it."""

    def _check_room(self) -> None:
        self._master.need()  # setup would try for a minute and a half
        room.check(self.name, self._bytes, "give a smaller segment_bytes")

    def _begin(self) -> None:
        """Join the store."""
        code = self.call("setup", master=self._master.address, **self._bytes)
        if code:
            raise StoreError("The client could not join", code, self.log)
        self.segment = self.call("name")
        self.endpoint = self._data_endpoint()

    def _data_endpoint(self) -> str:
        """Where its Transfer Engine listens: Mooncake tells it of an object's replicas only."""
        for connection in psutil.Process(self.pid).net_connections("tcp4"):
            if connection.status == "LISTEN":
                return f"127.0.0.1:{connection.laddr.port}"
        return ""

    def put(
        self,
        key: str,
        value: bytes,
        *,
        replicas: int = 1,
        segment: str = "",
        soft_pin: bool = False,
        hard_pin: bool = False,
    ) -> None:
        """Keep an object. One that is there already stays as it was, without an error.

        `replicas` in different segments, fewer where there are fewer segments; `segment`: that of
        the client on which it should lie, if there is such one and it has room. A soft pin makes
        eviction take others first, a hard pin forbids it. Raises StoreError.
        """
        if not isinstance(segment, str):
            raise EngineError(f"segment is a client's .segment, and not {segment!r:.80}.")
        code = self.call(
            "put",
            key=_key(key),
            value=_value(key, value),
            replicas=whole("replicas", replicas),
            segment=segment,
            soft_pin=bool(soft_pin),
            hard_pin=bool(hard_pin),
        )
        self._checked(f"put {key!r}", code)

    def put_many(self, values: dict[str, bytes]) -> None:
        """Keep several objects with one call. Raises StoreError."""
        if not isinstance(values, dict):
            raise EngineError(f"values is a dict of keys and their bytes, and not {values!r:.80}.")
        checked = {_key(key): _value(key, value) for key, value in values.items()}
        self._checked("put_many", self.call("put_many", values=checked))

    def get(self, key: str) -> bytes | None:
        """An object's bytes; None if there is none, or if whoever holds it does not answer.

        It grants a lease: the object stays for `lease_ms` from now. Raises StoreError.
        """
        value: bytes = self.call("get", key=_key(key))
        if not value:
            self._need_master(f"get {key!r}", key)
        return value or None

    def get_many(self, keys: list[str]) -> list[bytes | None]:
        """As get() for each; the master is asked once."""
        if not isinstance(keys, (list, tuple)):
            raise EngineError(f"keys is a list of texts, and not {keys!r:.80}: get() takes one.")
        keys = [_key(key) for key in keys]
        values = self.call("get_many", keys=keys) if keys else []
        missing = [key for key, value in zip(keys, values, strict=True) if not value]
        if missing:
            self._need_master("get_many", missing[0])
        return [value or None for value in values]

    def exists(self, key: str) -> bool:
        """Whether the master knows such an object. It grants a lease, as get() does.

        Raises StoreError, for "I do not know" is no answer to that.
        """
        return bool(self._checked(f"exists {key!r}", self._exists(key)))

    def size(self, key: str) -> int:
        """Bytes of an object. Raises StoreError, -704 if there is none."""
        return self._checked(f"size {key!r}", self.call("size", key=_key(key)))

    def remove(self, key: str, *, force: bool = False) -> None:
        """Remove an object; with `force`, also one with a lease. Raises StoreError."""
        self._checked(f"remove {key!r}", self.call("remove", key=_key(key), force=bool(force)))

    def remove_all(self) -> int:
        """Remove what has no lease; returns how many that were. Raises StoreError."""
        return self._checked("remove_all", self.call("remove_all"))

    def replicas(self, key: str) -> list[Replica]:
        """Where an object lies; empty if the master knows none of that name. Raises StoreError."""
        found = [Replica(**one) for one in self.call("replicas", key=_key(key))]
        if not found:
            self._need_master(f"replicas {key!r}", key)
        return found

    def _exists(self, key: str) -> int:
        code: int = self.call("exists", keys=[_key(key)])[0]
        return code

    def _need_master(self, what: str, key: str) -> None:
        """Raise StoreError where `what` found nothing because the master does not answer: Mooncake
        tells that apart from "no such object" only when asked whether the key exists."""
        self._checked(what, self._exists(key))

    def _checked(self, what: str, code: Any) -> int:
        if code < 0:
            raise StoreError(what, int(code), self.log)
        return int(code)


def _key(key: object) -> str:
    if isinstance(key, str) and key:
        return key
    raise EngineError(f"A key is a text that is not empty, and not {key!r:.80}.")


def _value(key: object, value: object) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise EngineError(
        f"The value of {key!r:.80} is bytes, and not {type(value).__name__}: use text.encode() or "
        f"array.tobytes()."
    )
