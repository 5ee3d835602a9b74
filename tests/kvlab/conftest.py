"""Engines that several tests share: started once, reset before each use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_help import within


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
