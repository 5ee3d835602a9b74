"""LMCache's server: KV that outlives the engine that computed it, in host memory and on disk.

    from kvlab.engines import lmcache, vllm

    with lmcache.start() as cache:
        with vllm.start(connector=cache.connector()) as engine:
            engine.generate(prompt)

The server is a process of its own (LMCache calls it MP mode); engines speak with it through
ZeroMQ on a loopback port, this module through HTTP. KV is kept in *chunks* of whole blocks: in
host memory (L1) and, if a folder is given, in files (L2). Checked against LMCache 0.5.6, whose
flags `lmcache server --help` lists.

Neither port asks for a token. Worse, on the engines' port KV may come as a pickle, which the server
unpickles (0.5.6, v1/multiprocess/modules/server_transfer.py): **any program and any user of this
machine can make it run code as you.** Where people whom you do not trust have an account, do not
start it. The scripts that its HTTP side could run stay off, as they are by default.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import blake3

from kvlab.engines import room
from kvlab.engines.process import Supervised
from kvlab.engines.protocol import EngineError, whole
from kvlab.engines.server import Server
from kvlab.engines.vllm import Connector
from kvlab.progress import Line

ENVIRONMENT = "vllm"
"""Whose Python has lmcache: vLLM's environment, for its connector uses it too."""

_MODES = ("engine_driven", "lmcache_driven")
_PATIENCE = 6
"""Seconds that an engine waits for an answer, and that lie between two of its pings."""
_NOTICED = 2 * _PATIENCE + 1
"""Seconds after which an engine has noticed for sure: one ping may just have been answered."""

_QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


def start(
    *,
    chunk_size: int = 128,
    memory_bytes: int = 512 << 20,
    folder: str | Path | None = None,
    port: int | None = None,
    deadline: float = 180,
) -> LMCache:
    """Start a server and return it when it answers.

    chunk_size: tokens of a chunk, a multiple of the engine's block size; memory_bytes: of L1;
    folder: where L2 keeps its files, which stay when the server stops (None: no L2). `port` is
    the one that engines use. Whoever has an account on this machine can run code through it.

    Raises EngineError, or kvlab.environments.EnvironmentMissing.
    """
    return LMCache(
        chunk_size=chunk_size,
        memory_bytes=memory_bytes,
        folder=folder,
        port=port,
        deadline=deadline,
    ).start()


class LMCache(Server):
    """An LMCache server; `start` makes one.

    An engine notices that its server has gone by a ping that fails, at the latest after 12 s: the
    log of vLLM says "entering degraded mode". Until then each of its calls waits 6 s: a request
    that looks up, computes, and stores in two calls waits 18 s. When pings are answered again the
    engine registers its KV anew, "resuming normal operation"; one that had no request yet sends no
    pings, and has to be restarted with the server (0.5.6,
    lmcache/integration/vllm/vllm_multi_process_adapter.py).
    """

    name = "LMCache"
    _environment_name = ENVIRONMENT
    _port_names = ("zmq", "http")
    _health = "/healthcheck"
    _metrics_prefix = "lmcache_"

    def __init__(
        self,
        *,
        chunk_size: int,
        memory_bytes: int,
        folder: str | Path | None,
        port: int | None,
        deadline: float,
    ) -> None:
        chunk_size = whole("chunk_size", chunk_size)
        memory_bytes = whole("memory_bytes", memory_bytes)
        if folder is not None and not isinstance(folder, (str, Path)):
            raise EngineError(f"folder is a path, or None for no L2, and not {folder!r:.80}.")
        super().__init__(f"with {memory_bytes >> 20} MiB", port=port, deadline=deadline)
        self.chunk_size = chunk_size
        self._memory_bytes = memory_bytes
        self.folder = folder
        self._is_used = False
        """Whether an engine may have registered its KV with it."""
        self._flags = [
            *("--chunk-size", str(chunk_size)),
            *("--l1-size-gb", str(memory_bytes / (1 << 30))),
            *("--eviction-policy", "LRU"),
        ]
        if folder is not None:
            adapter = {"type": "fs", "base_path": str(Path(folder).expanduser().absolute())}
            self._flags += ["--l2-adapter", json.dumps(adapter)]

    def _check_room(self) -> None:
        room.check(self.name, {"L1": self._memory_bytes}, "give a smaller memory_bytes")

    def _command(self) -> list[str]:
        return [
            *(str(self._python.with_name("lmcache")), "server"),
            *("--host", "127.0.0.1", "--port", str(self.ports["zmq"])),
            *("--http-host", "127.0.0.1", "--http-port", str(self.ports["http"])),
            # Both ways in which an engine can hand over its KV: see connector().
            *("--supported-transfer-mode", "auto"),
            *self._flags,
        ]

    def _variables(self, folder: Path) -> dict[str, str]:
        return super()._variables(folder) | _QUIET

    def _is_ready(self, run: Supervised) -> bool:
        return super()._is_ready(run) and self._listens(run, self.ports["zmq"])

    # What it is for.

    def connector(
        self, mode: Literal["engine_driven", "lmcache_driven"] = "engine_driven"
    ) -> Connector:
        """What makes vLLM use this server.

        Who copies: the engine, or the server out of memory that both share. KV that does not come
        is computed. Raises EngineError.
        """
        if mode not in _MODES:
            raise EngineError(f"mode is one of {', '.join(_MODES)}, and not {mode!r:.80}.")
        self._is_used = True
        return Connector(
            lambda: {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": self.ports["zmq"],
                    "lmcache.mp.mp_transfer_mode": mode,
                    # By default a call waits 300 s, and a ping comes every 10 s: so long would
                    # requests stand still that come between the end of the server and the ping
                    # that notices it.
                    "lmcache.mp.mq_timeout": _PATIENCE,
                    "lmcache.mp.heartbeat_interval": _PATIENCE,
                },
            },
            server=self,
            variables=_QUIET,
            chunk_size=self.chunk_size,
        )

    def restart(self) -> Self:
        """Stop, and start again when the engines that use it have noticed, after 13 s: one that
        had not would not register its KV anew, wait for each of its calls, and find nothing."""
        self.stop()
        if self._is_used:
            with Line(self._title) as line:
                until = time.monotonic() + _NOTICED
                while time.monotonic() < until:
                    line.tick(lambda seconds: f"engines notice that it stopped, {seconds:.0f} s")
                    time.sleep(0.1)
        return self.start()

    # What is known about it.

    def status(self) -> dict[str, Any]:
        """What it says of its parts: L1, L2 adapters, sessions."""
        found: dict[str, Any] = self._get("/status")
        return found

    def clear(self) -> None:
        """Empty L1, but for what is in use; L2 keeps its files."""
        with self._talking() as http:
            self._checked(http.post("/cache/clear"))


def chunk_keys(tokens: Sequence[int], chunk_size: int) -> list[bytes]:
    """The keys of a prompt's full chunks: each is a blake3 hash of the one before and of the
    chunk's tokens, as unsigned 32-bit numbers, big end first; the first one's forerunner is the
    hash of a single token 0 (LMCache 0.5.6, v1/multiprocess/token_hasher.py).
    """

    def digest(before: bytes, part: Sequence[int]) -> bytes:
        return blake3.blake3(before + struct.pack(f">{len(part)}I", *part)).digest()

    before, keys = digest(bytes(8), [0]), []
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        before = digest(before, tokens[start : start + chunk_size])
        keys.append(before)
    return keys
