"""Engines that several tests share: started once, reset before each use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlab import environments


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def need(*names: str) -> None:
    """Skip the module where an engine's environment was not made; fail in CI."""
    for name in names:
        try:
            environments.python(name)
        except environments.EnvironmentMissing as missing:
            if not os.environ.get("KVLAB_REQUIRE_ENGINES"):
                pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="session")
def warm() -> Iterator[Callable[..., Any]]:
    """warm(module, *arguments, **flags): the running engine that module.start gives for these,
    with an empty prefix cache. At most two run at a time; the one not used for longest goes."""
    running: dict[tuple[object, ...], Any] = {}

    def get(module: Any, *arguments: Any, **flags: Any) -> Any:
        key = (module.__name__, arguments, tuple(sorted(flags.items())))
        engine = running.pop(key, None)
        if engine is None or not engine.is_alive:
            if len(running) == 2:
                running.pop(next(iter(running))).stop()
            engine = module.start(*arguments, **flags)
        running[key] = engine  # the last one used is last
        assert within(60, engine.reset_prefix_cache)
        return engine

    yield get
    for engine in running.values():
        engine.stop()
