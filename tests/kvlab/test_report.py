"""Figures in the pages are those of the result files."""

import json

import pytest

from kvlab import report
from kvlab.paths import ROOT


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_are_in_step_with_the_result_files(page):
    text = (ROOT / page).read_text()
    assert report.filled(text) == text, "run `kvlab pages`"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.name)
def test_result_files_say_where_they_come_from(path):
    result = json.loads(path.read_text())
    for field in ("what", "date", "host", "versions", "conditions", "values"):
        assert result[field], field
    assert path.stat().st_size < 100_000


def test_a_missing_value_is_named():
    with pytest.raises(KeyError, match="no value 'speed'"):
        report.value("results/setup.json", "speed")


def test_a_changed_result_changes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    report.record("x", "a test", {"runs": 1}, {"n": 1, "rows": [{"a": 1, "b": 2}]})
    page = "so <!-- results/x.json n -->7<!-- / --> and <!-- results/x.json rows --><!-- / -->"
    filled = report.filled(page)
    assert "-->1<!--" in filled
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in filled
    assert report.filled(filled) == filled


def test_show_brings_the_value_and_where_it_comes_from(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    report.show("results/setup.json", "disk_gb")
    stamp = json.loads((ROOT / "results" / "setup.json").read_text())
    (text,) = (markdown.data for markdown in shown)
    assert text.startswith(f"**{stamp['values']['disk_gb']}** ")
    for part in (stamp["date"], stamp["what"], "results/setup.json", stamp["conditions"]["device"]):
        assert part in text
    with pytest.raises(KeyError, match="no value 'nothing'; it has"):
        report.show("results/setup.json", "nothing")
