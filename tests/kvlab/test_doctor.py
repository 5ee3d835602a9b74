"""The doctor answers on any machine: before the set-up, with damage, with a bad setting."""

import json
import os
import subprocess
import sys

import pytest

from kvlab import doctor, environments, models, systems
from kvlab.paths import ROOT


def test_it_runs_on_the_standard_library_alone(tmp_path):
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "shared"),
        "KVLAB_CACHE": str(tmp_path / "nothing yet"),
    }
    # -S: without site-packages, as under a bare Python.
    command = [sys.executable, "-S", "-m", "kvlab.doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NO vLLM environment: missing\n     Not made yet: `make setup`" in done.stdout
    assert "Chromium" in done.stdout
    assert not (tmp_path / "nothing yet").exists()


def test_a_damaged_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    (tmp_path / "models" / models.DEFAULT).mkdir(parents=True)
    row = doctor.findings()["Model"]
    assert not row.ok
    assert "no readable manifest" in row.verdict


def test_a_gpu_that_cannot_be_used_says_why(monkeypatch):
    old = environments.Gpu("P100", 16 << 30, (6, 0), (13, 0))
    monkeypatch.delenv("KVLAB_DEVICE", raising=False)
    monkeypatch.setattr(environments, "gpu", lambda: old)
    row = doctor.findings()["GPU"]
    assert not row.ok
    assert "compute capability 6.0" in row.verdict
    assert "cpu builds" in row.verdict


def test_what_is_not_installed_is_not_marked_as_if_it_were(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    doctor.report()
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    marks = {row[2]: row[1] for row in rows if len(row) == 6}
    assert marks["SGLang environment"] == marks["Router environment"] == "-"
    assert (marks["vLLM environment"], marks["Python"]) == ("NO", "ok")


def test_it_says_which_systems_were_seen_at_which_version(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")

    def told():
        doctor.report()
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line.startswith("│ LMCache"))
        return [cell.strip() for cell in line.split("│")]

    record = json.loads(systems.RECORD.read_text())
    seen = record["values"]["devices"]["cpu"]["LMCache"]
    assert told()[3:5] == [seen["version"], seen["date"]]
    seen["version"] = "0.0.1"
    changed = tmp_path / "systems.json"
    changed.write_text(json.dumps(record))
    monkeypatch.setattr(systems, "RECORD", changed)
    assert told()[4] == f"{seen['date']} (as 0.0.1)"
    monkeypatch.setattr(systems, "RECORD", tmp_path / "none")
    assert told()[4:6] == ["not seen", "not seen"]


def test_a_bad_setting_is_a_row_and_no_crash(monkeypatch, capsys):
    monkeypatch.setenv("KVLAB_DEVICE", "tpu")
    doctor.report()
    assert "tpu" in capsys.readouterr().out


def test_a_folder_that_may_not_be_read_is_a_row_and_no_crash(monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied", "/somewhere/.venv")

    monkeypatch.setattr(environments, "is_whole", refuse)
    row = doctor.findings()["Notebook environment"]
    assert not row.ok
    assert "Permission denied: '/somewhere/.venv'" in row.verdict


@pytest.mark.parametrize("module", ["no_such_module_here", "json"])
def test_deep_imports_are_tried(module):
    from pathlib import Path

    wrong = doctor._runs(Path(sys.executable), module)
    assert ("no_such_module_here" in wrong) == (module != "json")
