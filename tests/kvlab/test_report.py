"""Figures in the pages are those of the result files."""

import json

import pytest

from kvlab import report
from kvlab.paths import ROOT, SetupError


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_are_in_step_with_the_result_files(page):
    text = (ROOT / page).read_text()
    assert report.filled(text) == text, "run `kvlab pages`"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.name)
def test_result_files_say_where_they_come_from(path):
    result = json.loads(path.read_text())
    for field in ("what", "date", "host", "versions", "conditions", "values"):
        assert result[field], field
    assert set(result["host"]) == set(report.host())
    assert set(result["versions"]) == {"python", *report.VERSIONS_OF}
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


def result(**changes):
    found = {
        "what": "a run",
        "date": "2026-11-30",
        "host": {"cores": 2},
        "versions": {"python": "3.11"},
        "conditions": {"flags": "--a 1", "workload": {"sha256": "x"}},
        "values": {
            "latencies_ms": {"TTFT": {"p50": {"value": 10.0, "carries": True}}},
            "kind": "b",
        },
    }
    for name, value in changes.items():
        part, _, key = name.partition("_")
        found[part] = found[part] | {key: value}
    return found


def test_two_results_are_compared_where_only_the_subject_differs():
    other = result(conditions_flags="--a 2", values_latencies_ms={"TTFT": {"p50": {"value": 5.0}}})
    rows = report.side_by_side(result(), other, ["conditions.flags"])
    assert rows == [("latencies_ms.TTFT.p50.value", 10.0, 5.0)]
    with pytest.raises(report.NotComparable, match=r"conditions\.flags: '--a 1' and '--a 2'"):
        report.side_by_side(result(), other, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"host_cores": 16},
        {"versions_python": "3.12"},
        {"versions_new": "1"},
        {"conditions_workload": {"sha256": "y"}},
    ],
)
def test_two_results_that_differ_in_more_are_not(changes):
    with pytest.raises(report.NotComparable):
        report.side_by_side(result(), result(conditions_flags="2", **changes), ["conditions.flags"])
    assert report.side_by_side(result(), result(), [])
    with pytest.raises(report.NotComparable, match="what was measured"):
        report.side_by_side(result(), result() | {"what": "another"}, [])
    with pytest.raises(report.NotComparable):
        report.side_by_side(result(), result(host_cores=4), ["", "h"])
    with pytest.raises(report.NotComparable, match="no number in common"):
        report.side_by_side(result(), result() | {"values": {"other": 1}}, [])


def test_show_prints_or_says_why_not(tmp_path, capsys):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(result()))
    two.write_text(json.dumps(result(host_cores=4)))
    report.print_result(one)
    assert "a run" in capsys.readouterr().out
    report.print_comparison(one, two, ["host.cores"])
    assert "1.00" in capsys.readouterr().out
    deep = json.dumps(result()).replace('"a run"', "[" * 400 + "]" * 400)
    for text in ("{}", "[]", "{", '{"what": 1}', "7", "null", '"values"', deep, "[" * 10**5):
        one.write_text(text)
        with pytest.raises(SetupError, match="is no result file"):
            report.print_result(one)


def test_what_stands_in_a_result_is_printed_and_does_nothing_else(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    odd = "[bold]x[/] [/nothing] \ud800 \x1b[31m"
    plainly = r"[bold]x[/] [/nothing] \ud800 \x1b[31m"
    one, two = tmp_path / "[red]one.json", tmp_path / "two.json"
    names = {"a": odd, odd: 1}
    one.write_text(
        json.dumps(result() | {"what": odd, "values": names, "versions": {odd: 1}, "date": 3})
    )
    two.write_text(
        json.dumps(
            result() | {"what": odd, "values": names, "versions": {odd: 1}, "conditions": {odd: 2}}
        )
    )
    report.print_result(one)
    said = " ".join(capfd.readouterr().out.split())
    assert f"[red]one.json: {plainly}, 3" in said
    assert f"values.{plainly}" in said
    assert "\x1b" not in said
    report.print_comparison(one, two, ["conditions"])
    said = " ".join(capfd.readouterr().out.split())
    assert plainly in said
    assert "1.00" in said
    with pytest.raises(report.NotComparable) as refused:
        report.print_comparison(one, two, [])
    assert str(refused.value).encode()
