"""What tests of engines share besides fixtures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

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
