"""The checkout's .venv is used as it is only where it was made, for what it was made.

A small checkout with the real set-up code and two of the real pins (uv and setuptools),
installed as pip is configured here.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from kvlab import setup
from kvlab.paths import ROOT

ENSURE = """
import sys
from kvlab import paths, setup
sys.exit(paths.run_plainly(setup.ensure_venv))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small checkout whose .venv was made, and a cache folder."""
    folder = tmp_path_factory.mktemp("set-up")
    root = folder / "a course"
    shutil.copytree(ROOT / "shared" / "kvlab", root / "shared" / "kvlab")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("LICENSE", "LICENSE-text"):
        shutil.copy(ROOT / name, root)
    pins = (ROOT / "requirements" / "notebook-cpu.txt").read_text()
    (root / "requirements").mkdir()
    few = re.findall(r"^(?:uv|setuptools)==.*\n", pins, re.MULTILINE)
    (root / "requirements" / "notebook-cpu.txt").write_text("".join(few))
    said = ensure(root)
    assert "Installed the notebook environment" in said
    return root


def ensure(root):
    """Run the set-up's first half there; what it said."""
    env = os.environ | {
        "PYTHONPATH": str(root / "shared"),
        "KVLAB_CACHE": str(root.parent / "cache"),
        "KVLAB_DEVICE": "cpu",
    }
    # Its own interpreter makes .venv: not the environment in which these tests run.
    python = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run([python, "-c", ENSURE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def where_kvlab_is(root):
    """The package that .venv's Python imports."""
    command = [root / ".venv" / "bin" / "python", "-c", "import kvlab; print(kvlab.__file__)"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, env=env, cwd="/", capture_output=True, text=True, check=True
    ).stdout.strip()


def test_it_holds_this_checkout_and_is_made_once(made):
    assert where_kvlab_is(made) == str(made / "shared" / "kvlab" / "__init__.py")
    assert ensure(made) == ""


def test_moved_pins_bring_it_up_to_date(made):
    pins = made / "requirements" / "notebook-cpu.txt"
    before = (made / ".venv" / "pyvenv.cfg").stat().st_ino
    pins.write_text(pins.read_text() + "iniconfig==2.3.0\n")
    said = ensure(made)
    assert "The pins have moved: .venv is brought up to date." in said
    assert (made / ".venv" / "pyvenv.cfg").stat().st_ino == before
    assert list((made / ".venv").glob("lib/*/site-packages/iniconfig"))
    assert ensure(made) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"python": "/opt/other"}, "was made by another Python"),
        ({"device": "cuda"}, "was made for cuda"),
        (None, "is not whole"),
    ],
)
def test_it_is_made_again(made, change, reason):
    marker = made / ".venv" / "whole.json"
    if change is None:  # what a set-up leaves that was killed on the way
        marker.unlink()
    else:
        marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    (made / ".venv" / "stray").touch()
    assert f".venv {reason}: it is made again." in ensure(made)
    assert not (made / ".venv" / "stray").exists()
    assert ensure(made) == ""


def test_a_moved_checkout_gets_a_new_one(made):
    moved = made.with_name("moved course")
    made.rename(moved)
    try:
        said = ensure(moved)
        assert f".venv was made in {made / '.venv'}: it is made again." in said
        assert where_kvlab_is(moved) == str(moved / "shared" / "kvlab" / "__init__.py")
    finally:
        moved.rename(made)


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")]
)
def test_other_machines_are_sent_to_the_devcontainer(monkeypatch, system, machine):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert f"This is {system} on {machine}" in setup.refusal()
    assert "devcontainer" in setup.refusal()
