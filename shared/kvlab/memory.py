"""How much main memory a new process can have. Standard library only: the doctor needs it early."""

from __future__ import annotations

import contextlib
from pathlib import Path


def of_machine() -> tuple[int, int]:
    """Bytes of main memory: all, and what a new process could have if no container limits it."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    return found["MemTotal"], found["MemAvailable"]


_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes of main memory that a new process can have: the machine's, or what is left of the
    narrowest limit of its control groups."""
    _, left = of_machine()
    for line in _GROUPS.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html
            root, limit, usage = _ROOT, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # version 1
            root, limit, usage = _ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        leaf = root / group.lstrip("/")
        # A limit holds for all groups below. Inside a container the group's path may be the host's
        # and not be there; then the root is its own group.
        for folder in (leaf, *leaf.parents):
            if folder.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                    left = min(
                        left, max(0, int((folder / limit).read_text()) - _used(folder, usage))
                    )
    return left


def _used(folder: Path, usage: str) -> int:
    """Bytes that a control group and those below it hold, but for file pages that nobody used for
    long: they are given up before anyone is killed."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    # In version 1 the plain figure is that of the group alone.
    inactive = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return int((folder / usage).read_text()) - inactive
