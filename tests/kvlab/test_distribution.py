"""The ways to get the course other than `make`: conda, Binder, a devcontainer, CI.

None of them runs here as it does elsewhere, so what they say is held to the pins
files and to the Makefile.
"""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.paths import ROOT

CONDA = ROOT / "environment.yml"
BINDER = ROOT / "binder"
CI = ROOT / ".ci" / "run"
REQUIREMENTS = ROOT / "requirements"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def requirement_lines(text):
    lines = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def options(lines):
    return [line for line in lines if line.startswith("-")]


def requirements(lines):
    """{name: requirement} of the lines that are not options."""
    parsed = [Requirement(line) for line in lines if not line.startswith("-")]
    named = {canonicalize_name(requirement.name): requirement for requirement in parsed}
    assert len(named) == len(parsed), "a package is named twice"
    return named


def versions(lines):
    """{name: version}; every requirement must be an exact one."""
    found = {}
    for name, requirement in requirements(lines).items():
        (exact,) = requirement.specifier
        assert exact.operator == "==", requirement
        found[name] = exact.version
    return found


def pins(device):
    return versions(requirement_lines((REQUIREMENTS / f"notebook-{device}.txt").read_text()))


def wanted():
    return requirements(requirement_lines((REQUIREMENTS / "notebook.in").read_text())).keys()


def unequal(found, pinned):
    """{name: (version found, version pinned)} where they differ."""
    return {n: (v, pinned.get(n)) for n, v in found.items() if v != pinned.get(n)}


def conda_parts():
    """(the packages that conda brings, the lines that it passes to pip)"""
    *packages, rest = yaml.safe_load(CONDA.read_text())["dependencies"]
    return packages, rest["pip"]


def runs(text):
    """The make targets that a script calls."""
    return re.findall(r"^\s*(?:exec )?make +([\w-]+)", text, flags=re.MULTILINE)


def test_conda_brings_python_and_pip_only():
    packages, _ = conda_parts()
    assert packages == ["python=3.12", "pip"]


def test_conda_has_every_requirement_in_its_pinned_version():
    _, lines = conda_parts()
    found = versions(lines)
    assert not wanted() - found.keys()
    assert "triton" in found
    assert not unequal(found, pins("cuda"))
    assert options(lines) == ["--constraint requirements/notebook-cuda.txt", "--editable ."]


def test_binder_has_the_pinned_versions():
    by_pip = versions(requirement_lines((BINDER / "requirements.txt").read_text()))
    lines = requirement_lines((BINDER / "notebook.txt").read_text())
    by_uv = versions(lines)
    # pip must bring nothing that brings torch: it would be the CUDA build.
    assert by_pip.keys() == {"uv"}
    assert "torch" in by_uv
    assert by_uv.keys() < wanted()
    assert not unequal(by_pip | by_uv, pins("cpu"))
    # Paths in a requirements file start from that file's folder.
    assert options(lines) == ["--constraint ../requirements/notebook-cpu.txt"]


def test_binder_builds_the_rest():
    assert (BINDER / "runtime.txt").read_text() == "python-3.12\n"
    script = BINDER / "postBuild"
    assert script.stat().st_mode & 0o111, "Binder runs postBuild only if it is executable"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "--torch-backend cpu --requirements binder/notebook.txt" in text
    (command,) = re.findall(r"^kvlab (.*)", text, flags=re.MULTILINE)
    asked = CliRunner().invoke(app, [*command.split(), "--help"])
    assert asked.exit_code == 0, asked.output


def test_no_package_index_is_named():
    files = [CONDA, *BINDER.iterdir(), *REQUIREMENTS.iterdir()]
    address = re.compile(r"://|--(extra-|default-)?index\b|--find-links|^\s*-?\s*-[if]\b", re.M)
    assert len(files) > 5
    assert not [(f.name, a.group()) for f in files if (a := address.search(f.read_text()))]


@pytest.mark.parametrize("file", [*WORKFLOWS, CI], ids=lambda path: path.name)
def test_ci_calls_make_targets_that_exist(file):
    if file == CI:
        subprocess.run(["bash", "-n", CI], check=True)
        scripts = [CI.read_text()]
    else:
        jobs = yaml.safe_load(file.read_text())["jobs"]
        scripts = [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]
    called = [target for script in scripts for target in runs(script)]
    there = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert called
    assert not set(called) - set(there)


def test_ci_runs_the_test_command_of_the_readme():
    (command,) = re.findall(r"^(make test)\b", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert command in CI.read_text().splitlines()
    cpu, gpu = (path.read_text() for path in WORKFLOWS)
    assert "run: bash .ci/run\n" in cpu
    assert f"run: {command}\n" in gpu


def test_devcontainer_is_x86_64_and_sets_up_by_a_target():
    text = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    # JSON with comments; without its // lines it is YAML too.
    config = yaml.safe_load(re.sub(r"^\s*//.*", "", text, flags=re.MULTILINE))
    assert "--platform=linux/amd64" in config["runArgs"]
    assert config["postCreateCommand"] == "make setup"
    (port,) = re.findall(r"^PORT \?= (\d+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert config["forwardPorts"] == [int(port)]
