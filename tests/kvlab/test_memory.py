"""How much memory is free: the machine's figure, and the limits of all control groups above."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab import memory

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine with 64 GiB free."""
    monkeypatch.setattr(memory, "of_machine", lambda: (96 * GIB, 64 * GIB))
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    return tmp_path


def version_2(folder: Path, limit: int | str, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 2\n")


def test_on_this_machine() -> None:
    total, free = memory.of_machine()
    assert 0 < memory.available() <= free < total


def test_the_narrowest_limit_between_leaf_and_root_counts(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/user/session/leaf\n")
    version_2(groups / "user", 20 * GIB, 15 * GIB)
    version_2(groups / "user/session", 8 * GIB, GIB)
    version_2(groups / "user/session/leaf", "max", GIB)
    assert memory.available() == 5 * GIB
    version_2(groups / "user/session", 3 * GIB, GIB)
    assert memory.available() == 2 * GIB
    version_2(groups / "user/session/leaf", GIB, 2 * GIB)
    assert memory.available() == 0


def test_file_pages_that_nobody_uses_count_as_free(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/user/leaf\n")
    version_2(groups / "user", 8 * GIB, 7 * GIB, inactive=3 * GIB)
    version_2(groups / "user/leaf", "max", 7 * GIB)
    assert memory.available() == 4 * GIB


def test_version_1_and_a_path_that_is_the_hosts(groups: Path) -> None:
    (groups / "cgroup").write_text("5:cpu:/docker/abc\n4:memory,hugetlb:/docker/abc\n")
    own = groups / "memory"
    own.mkdir()
    (own / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (own / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
    (own / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB}\n")
    assert memory.available() == 3 * GIB
    (groups / "cgroup").write_text("4:cpu:/docker/abc\n")
    assert memory.available() == 64 * GIB


def test_without_any_limit_it_is_the_machines(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/\n")
    assert memory.available() == 64 * GIB
