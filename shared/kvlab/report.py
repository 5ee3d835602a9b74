"""Measured figures reach the reader from result files, never from somebody's keyboard.

A result file in results/ is JSON with `what` was measured, on which `host`, with
which `versions`, under which `conditions`, when (`date`), and the `values`. Markdown
pages quote a value between two comments that a browser does not show:

    <!-- results/setup.json disk_gb -->4.9<!-- / -->

`fill` writes the present values there; a test fails when a page is out of step.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlab import environments
from kvlab.paths import ROOT, SetupError

PAGES = ("README.md", "CONTRIBUTING.md")
VERSIONS_OF = ("torch", "transformers")
"""Of the notebook environment; an engine's are in the conditions of what was measured on it."""

_QUOTE = re.compile(r"<!-- (results/[\w.-]+\.json) (\w+) -->.*?<!-- / -->", re.DOTALL)


def record(name: str, what: str, conditions: Mapping[str, Any], values: Mapping[str, Any]) -> Path:
    """Write results/<name>.json, stamped with this host, the versions and the date."""
    path = ROOT / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "host": host(),
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in VERSIONS_OF},
        },
        "conditions": dict(conditions),
        "values": dict(values),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def host() -> dict[str, Any]:
    """What this machine is."""
    import psutil

    gpu = environments.gpu()
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": None if isinstance(gpu, str) else gpu.name,
    }


def value(file: str, key: str) -> Any:
    """One value of a result file, such as value("results/setup.json", "disk_gb").

    Raises SetupError if the file is missing, KeyError that names the keys it has.
    """
    if not (ROOT / file).exists():
        raise SetupError(f"There is no {file} yet: CONTRIBUTING.md says how to measure.")
    values = json.loads((ROOT / file).read_text())["values"]
    if key not in values:
        raise KeyError(f"{file} has no value {key!r}; it has {', '.join(values)}")
    return values[key]


class NotComparable(SetupError):
    """Two results differ in more than what they are compared for."""


_NO_CONDITION = ("what", "date", "values")
_DEEPEST = 20
"""Levels of a result file; no result of the course has half as many."""


def _flat(found: Any, name: str = "") -> dict[str, Any]:
    """Nested values as one level: {"host.cores": 2, ...}."""
    if not isinstance(found, dict):
        return {name: found}
    return {k: v for key, value in found.items() for k, v in _flat(value, f"{name}.{key}").items()}


def _fits(found: Any, levels: int) -> bool:
    """Whether it is nested in no more than so many levels."""
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return levels > 0 and all(_fits(part, levels - 1) for part in parts)


def load(path: Path) -> dict[str, Any]:
    """A result file. Raises SetupError for what is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"{path} is no result file: {error}") from error
    if not isinstance(found, dict) or not set(_NO_CONDITION) < found.keys():
        raise SetupError(f"{path} is no result file: it has no {', '.join(_NO_CONDITION)}.")
    if not _fits(found, _DEEPEST):
        raise SetupError(f"{path} is no result file: it is nested in more than {_DEEPEST} levels.")
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The conditions in which two results differ: (name, there, here)."""
    one, two = (
        {
            name[1:]: value
            for name, value in _flat({k: v for k, v in x.items() if k not in _NO_CONDITION}).items()
        }
        for x in (a, b)
    )
    names = sorted(one.keys() | two.keys())
    return [(n, one.get(n), two.get(n)) for n in names if one.get(n) != two.get(n)]


def side_by_side(
    a: dict[str, Any], b: dict[str, Any], subject: Sequence[str]
) -> list[tuple[str, float, float]]:
    """The numbers of two results, (name, a, b), where their conditions differ in nothing but
    `subject`: names of conditions, such as "conditions.flags", or of all below, "conditions".

    Raises NotComparable that names the others.
    """
    others = [
        f"{_plain(name)}: {there!r} and {here!r}"
        for name, there, here in differences(a, b)
        if not any(name == of or (of and name.startswith(f"{of}.")) for of in subject)
    ]
    if a["what"] != b["what"]:
        others.insert(0, f"what was measured: {a['what']!r} and {b['what']!r}")
    if others:
        raise NotComparable(
            "These results are not compared, for they differ in\n  "
            + "\n  ".join(others)
            + "\nIf one of these is what you compare, name it: --subject NAME."
        )
    one, two = _flat(a["values"]), _flat(b["values"])
    rows = [
        (name[1:], one[name], two[name])
        for name in one
        if all(isinstance(x.get(name), int | float) for x in (one, two))
        and not isinstance(one[name], bool)
    ]
    if not rows:
        raise NotComparable("These results have no number in common.")
    return rows


def _plain(found: Any) -> Text:
    """What stands in a file, for the terminal: neither markup nor control characters work in it,
    and what UTF-8 cannot say (half of a surrogate pair) is written as an escape."""
    return Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(found)))


def print_result(path: Path) -> None:
    """Print one result file. Raises SetupError for what is none."""
    found = load(path)
    title = _plain(f"{path.name}: {found['what']}, {found['date']}")
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("", overflow="fold")
    for part in ("host", "versions", "conditions", "values"):
        for name, value in _flat(found.get(part, {})).items():
            table.add_row(_plain(part + name), _plain(value))
        table.add_section()
    Console().print(table)


def print_comparison(first: Path, second: Path, subject: Sequence[str]) -> None:
    """Print two result files side by side. Raises NotComparable."""
    a, b = load(first), load(second)
    rows = side_by_side(a, b, subject)
    table = Table(title=_plain("; ".join(f"{n}: {x} and {y}" for n, x, y in differences(a, b))))
    for heading in ("", first.name, second.name, "ratio"):
        table.add_column(_plain(heading))
    for name, one, two in rows:
        table.add_row(_plain(name), str(one), str(two), f"{two / one:.2f}" if one else "")
    Console().print(table)


def show(file: str, key: str) -> None:
    """Display a measured value in a notebook, with the conditions it was measured under.

    For a cell whose input is hidden (tag "remove-input"): so no figure is typed into prose.
    """
    from IPython.display import Markdown, display

    stamp = json.loads((ROOT / file).read_text())
    conditions = ", ".join(f"{name} {what}" for name, what in stamp["conditions"].items())
    text = _markdown(value(file, key))
    source = f"{stamp['what']}; {conditions}; {stamp['date']} ({file})"
    display(Markdown(f"**{text}** <small>{source}</small>"))


def filled(page: str) -> str:
    """The Markdown text with every quoted value replaced by the present one."""
    return _QUOTE.sub(
        lambda quote: (
            f"<!-- {quote[1]} {quote[2]} -->{_markdown(value(quote[1], quote[2]))}<!-- / -->"
        ),
        page,
    )


def fill_pages() -> list[str]:
    """Bring the values in README and CONTRIBUTING up to date; the names of changed pages."""
    changed = []
    for name in PAGES:
        path = ROOT / name
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            changed.append(name)
    return changed


def _markdown(found: Any) -> str:
    """A number as it is; a list of rows as a table."""
    if not isinstance(found, list):
        return str(found)
    columns = list(found[0])
    lines = [columns, ["---"] * len(columns), *([str(row[c]) for c in columns] for row in found)]
    return "\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
