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


def available() -> int:
    """Bytes of main memory that a new process can have: the machine's, or its container's."""
    _, left = of_machine()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":  # version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):  # version 1
            root = Path("/sys/fs/cgroup/memory")
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # Inside a container the group's path may be the host's; then the root is its own group.
        for folder in {root / group.lstrip("/"), root}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                used = int((folder / usage).read_text())
                # File pages that nobody used for long are given up before anyone is killed.
                used -= int(stat.get("total_inactive_file", stat["inactive_file"]))
                left = min(left, max(0, int((folder / limit).read_text()) - used))
    return left
