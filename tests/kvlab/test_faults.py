"""What goes wrong on a machine: a full disk, two notebooks at once, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_help import need, within
from stand_in import StandIn

from kvlab import supervisor, systems
from kvlab.engines import lmcache, mooncake, router, sglang, transfer_engine, vllm
from kvlab.engines.lmcache import LMCache
from kvlab.engines.process import System, telling_lines
from kvlab.engines.protocol import EngineError
from kvlab.paths import ROOT

need("vllm", "sglang", "router")

MODEL = "tiny-random"
PROMPT = [random.Random(1).randrange(10, 250) for _ in range(401)]


# What it says.


def test_an_error_that_mentions_info_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "INFO 11-30 05:12:01 [x.py:1] ValueError: of no harm: as a line of INFO\n"
        "(Worker pid=7) INFO 11-30 05:12:01 [x.py:1] RuntimeError: nor that\n"
        "[2026-11-30 05:12:01] INFO: OSError: nor that\n"
        "(EngineCore pid=7) ERROR 11-30 05:12:02 [x.py:2] torch.distributed.DistBackendError: NCCL "
        "error, run with NCCL_DEBUG=INFO for details\n"
        "RuntimeError: INFO was not enough\n"
    )
    assert telling_lines(log) == [
        "torch.distributed.DistBackendError: NCCL error, run with NCCL_DEBUG=INFO for details",
        "RuntimeError: INFO was not enough",
    ]


def test_a_look_names_who_died() -> None:
    """What a connector says of it: fewer tokens than were stored."""
    with StandIn().start() as cache, StandIn().start() as engine:
        cache.name, engine.name = "cache", "engine"
        with pytest.raises(EngineError, match=r"^0 tokens$"), systems.naming(cache, engine):
            raise EngineError("0 tokens")
        os.kill(cache.pid, signal.SIGKILL)
        assert within(10, lambda: not cache.is_alive)
        with pytest.raises(EngineError) as told, systems.naming(cache, engine):
            raise EngineError("0 tokens")
        assert str(told.value) == f"0 tokens Ended meanwhile: cache (its log: {cache.log})."


# A full disk.


class OnSmallDisk(LMCache):
    """LMCache whose L2 folder is a file system of 700 KiB that only its processes see."""

    def _command(self) -> list[str]:
        mount = 'mount -t tmpfs -o size=700k none "$0" && exec "$@"'
        return ["unshare", "-rm", "sh", "-c", mount, str(self.folder), *super()._command()]


def test_the_disk_of_l2_is_full(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system (unshare -rm)")
    small = OnSmallDisk(
        chunk_size=128, memory_bytes=256 << 20, folder=tmp_path, port=None, deadline=180
    )
    with small.start() as cache, vllm.start(MODEL, connector=cache.connector()) as engine:

        def cached() -> int:
            assert within(30, engine.reset_prefix_cache)
            answer = engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
            assert answer.token_ids == first.token_ids
            assert answer.logprobs == pytest.approx(first.logprobs, abs=1e-4)
            return answer.cached_tokens

        first = engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
        # Three chunks of 512 KiB each, of which one has room.
        assert within(30, lambda: "No space left on device" in cache.log.read_text())
        assert within(30, lambda: cached() == 384)  # from L1, which has them all
        cache.clear()
        # A chunk that was cut short must not be taken for whole, nor the chain go on behind it.
        assert cached() in (0, 128)
        assert engine.is_alive
        assert cache.status()


# Two notebooks at once.

_NOTEBOOK = f"""
import sys
sys.path.insert(0, {str(ROOT / "shared")!r})
from kvlab.engines import vllm
with vllm.start({MODEL!r}) as engine:
    print(engine.port, engine.generate([5, 6, 7] * 30, max_tokens=4, ignore_eos=True).token_ids)
    sys.stdout.flush()
    sys.stdin.readline()
"""


def test_two_notebooks_start_the_same_engine() -> None:
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _NOTEBOOK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    with both[0], both[1]:
        try:
            said = [process.stdout.readline().split(" ", 1) for process in both]  # type: ignore[union-attr]
            assert said[0][0] != said[1][0]
            assert said[0][1] == said[1][1] != ""
            for process in both:
                process.communicate("\n", timeout=60)
                assert process.returncode == 0
        finally:
            for process in both:
                process.kill()


# Nothing is left: after stop(), and when whoever started it is killed.


def _mooncake() -> Iterator[System]:
    with mooncake.start() as master, master.client(segment_bytes=64 << 20) as client:
        yield from (master, client)


def _router() -> Iterator[System]:
    # It refuses to start without a server behind it that answers.
    with sglang.start(MODEL) as replica, router.start([replica]) as front:
        yield from (replica, front)


def _alone(start: Callable[[], System]) -> Callable[[], Iterator[System]]:
    def one() -> Iterator[System]:
        with start() as system:
            yield system

    return one


SYSTEMS: dict[str, Callable[[], Iterator[System]]] = {
    "vllm": _alone(lambda: vllm.start(MODEL)),
    "lmcache": _alone(lambda: lmcache.start(memory_bytes=64 << 20)),
    "mooncake": _mooncake,
    "transfer_engine": _alone(lambda: transfer_engine.start(1 << 20)),
    "sglang_and_router": _router,
}


def traces(system: System) -> dict[str, Any]:
    run = system._begun
    return {
        "processes": [process.pid for process in supervisor.marked(run.folder.name)],
        "folder": str(run.folder),
        "ports": list(system.ports.values()),
    }


def left(found: dict[str, Any]) -> list[str]:
    """What of a run's traces is still there."""
    name = Path(found["folder"]).name
    there = [f"process {process.pid}" for process in supervisor.marked(name)]
    there += [f"folder {found['folder']}"] if Path(found["folder"]).exists() else []
    listening = {c.laddr.port for c in psutil.net_connections("inet") if c.status == "LISTEN"}
    return there + [f"port {port}" for port in found["ports"] if port in listening]


_STARTER = f"""
import json, sys, time
sys.path[:0] = [{str(ROOT / "shared")!r}, {str(Path(__file__).parent)!r}]
import test_faults
running = test_faults.SYSTEMS[sys.argv[1]]()
count = int(sys.argv[2])
started = [next(running) for _ in range(count)]
print(json.dumps([test_faults.traces(system) for system in started]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("name", SYSTEMS)
def test_three_starts_leave_nothing(name: str) -> None:
    for _ in range(2):
        found = [traces(system) for system in SYSTEMS[name]()]
        assert all(trace["processes"] for trace in found)
        assert [left(trace) for trace in found] == [[] for _ in found]
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, name, str(len(found))], stdout=subprocess.PIPE, text=True
    ) as starter:
        try:
            assert starter.stdout is not None
            found = json.loads(starter.stdout.readline())
            assert all(left(trace) for trace in found)
        finally:
            starter.kill()
    for trace in found:
        assert within(60, lambda trace=trace: not left(trace)), left(trace)
