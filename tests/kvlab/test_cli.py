"""The Makefile and the command line: other Pythons, wrong names, and what clean may remove."""

import json
import os
import platform
import subprocess
import sys

import pytest

from kvlab import clean, paths, setup
from kvlab.paths import ROOT


def _run(*command, **variables):
    env = os.environ | {"PYTHONPATH": str(ROOT / "shared")} | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    return done


def _kvlab(*arguments, **variables):
    return _run(sys.executable, "-m", "kvlab.cli", *arguments, **variables)


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 13, 0)])
def test_other_pythons_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))
    said = setup.refusal()
    assert f"Found Python {version[0]}.{version[1]}.{version[2]}" in said
    assert "make lab PYTHON=/path/to/python3.12" in said


def test_this_python_is_taken():
    assert setup.refusal() == ""


def test_other_systems_are_shown_the_devcontainer(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert "Darwin on arm64" in setup.refusal()
    assert "devcontainer" in setup.refusal()


def test_make_alone_lists_its_targets():
    said = _run("make").stdout
    for target in ("make lab", "make test", "make clean-cache"):
        assert target in said


def test_an_unknown_notebook_lists_those_there_are():
    done = _kvlab("run", "labs/77")
    assert done.returncode == 1
    assert "chapters/00_one_request.ipynb" in done.stderr


def test_clean_cache_leaves_a_foreign_folder_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = _kvlab("clean", "--cache", KVLAB_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert "nothing was removed" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_clean_cache_says_how_much(tmp_path):
    program = (
        "from kvlab.paths import make_cache; (make_cache() / 'x').write_bytes(bytes(20 << 20))"
    )
    folder = tmp_path / "cache"
    _run(sys.executable, "-c", program, KVLAB_CACHE=str(folder))
    done = _kvlab("clean", "--cache", KVLAB_CACHE=str(folder))
    assert "Freed 0.02 GB" in done.stdout
    assert not folder.exists()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("ROOT", "VENV"):
        monkeypatch.setattr(clean, name, tmp_path / ("" if name == "ROOT" else ".venv"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "00.ipynb").write_text("work")
    return tmp_path


def test_an_empty_variable_is_no_wish_for_the_default():
    done = _kvlab("clean", "--cache", KVLAB_CACHE="")
    assert done.returncode == 1
    assert "KVLAB_CACHE is set, but empty" in done.stderr


def test_a_cache_in_use_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    with paths.lock("a", "installing something"):
        done = _kvlab("clean", "--cache", KVLAB_CACHE=str(tmp_path))
        assert done.returncode == 1
        assert f"in use by process {os.getpid()}, which is installing something" in done.stderr
        assert (tmp_path / "locks" / "a.lock").exists()
    assert _kvlab("clean", "--cache", KVLAB_CACHE=str(tmp_path)).returncode == 0
    assert not tmp_path.exists()


def test_an_interrupted_removal_can_be_taken_up(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    paths.make_cache("a")

    def stop(place):
        raise KeyboardInterrupt

    monkeypatch.setattr(clean.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        clean.cache_folder()
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    clean.cache_folder()
    assert not tmp_path.exists()


@pytest.mark.parametrize("own", [True, False])
def test_clean_keeps_my_and_other_checkouts_kernels(checkout, own, capsys):
    kernel = checkout / "jupyter" / "kernels" / "follow-the-request"
    kernel.mkdir(parents=True)
    python = (checkout if own else checkout / "another") / ".venv" / "bin" / "python"
    (kernel / "kernel.json").write_text(json.dumps({"argv": [str(python)]}))
    clean.checkout()
    assert "Freed" in capsys.readouterr().out
    assert not (checkout / ".venv").exists()
    assert (checkout / "my" / "00.ipynb").read_text() == "work"
    assert kernel.exists() != own


@pytest.mark.parametrize("hours", ["nan", "inf", "0", "-2"])
def test_a_plan_for_no_time_is_refused(hours):
    done = _kvlab("plan", "--hours", hours)
    assert done.returncode == 1
    assert "--hours" in done.stderr + done.stdout


@pytest.mark.parametrize("python", ["/bin/true", "/no/python"])
def test_what_is_no_python_is_refused(python):
    done = _kvlab("test-python", python)
    assert done.returncode == 1
    assert python in done.stderr + done.stdout
