"""Whoever needs more memory than is free says so before it starts, with all that it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvlab import environments
from kvlab.engines import lmcache, mooncake, room, sglang, vllm, vllm_connectors
from kvlab.engines.process import System
from kvlab.engines.protocol import EngineError

MODEL = "tiny-random"
HUGE = 1 << 50
MASTER = mooncake.Master(lease_ms=1, client_ttl_seconds=1, port=None, deadline=1)


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    monkeypatch.setattr(environments, "python", lambda name: Path(sys.executable))
    monkeypatch.setattr(System, "need", lambda system: None)  # the master does as if it ran

    def started(*_: object) -> None:
        raise AssertionError("it did not look whether there is room")

    monkeypatch.setattr(System, "_start_once", started)


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (lambda: vllm.start(MODEL, kv_cache_memory_bytes=HUGE), "KV cache"),
        (lambda: vllm.start(MODEL, connector=vllm_connectors.to_host(HUGE)), "connector"),
        (
            lambda: vllm.start(
                MODEL, connector=vllm_connectors.to_mooncake(MASTER, segment_bytes=HUGE)
            ),
            "connector",
        ),
        (lambda: sglang.start(MODEL, hicache=sglang.HiCache(ratio=1e9)), "host tier"),
        (
            lambda: sglang.start(MODEL, hicache=sglang.HiCache(master=MASTER, segment_bytes=HUGE)),
            "lent to the store",
        ),
        (lambda: lmcache.start(memory_bytes=HUGE), "L1"),
        (lambda: MASTER.client(segment_bytes=HUGE), "segment_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_all_that_it_takes_counts(start: Callable[[], object], part: str) -> None:
    with pytest.raises(EngineError, match=rf"\d GiB {part}.* are free\. Stop other"):
        start()


def test_the_parts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.memory, "available", lambda: 3 << 30)
    room.check("It", {"a": 1 << 30, "b": 2 << 30}, "give less")
    with pytest.raises(EngineError, match=r"needs about 3\.5 GiB .*\(1\.5 GiB a, 2\.0 GiB b\)"):
        room.check("It", {"a": 3 << 29, "b": 2 << 30}, "give less")
