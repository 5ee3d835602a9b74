"""What lab 06 tells of counters, read out of its notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvlab import notebooks
from kvlab.paths import ROOT

LAB = notebooks.read(ROOT / "solutions" / "06_the_map.ipynb")
LINES_4 = {
    "local_compute": "computed",
    "local_cache_hit": "own pool",
    "external_kv_transfer": "brought",
    "lookup_requested": "looked up",
    "hit_l1": "hits in host memory",
    "hit_l2": "hits in files",
    "load_submitted": "to load",
    "load_completed": "loaded",
    "nixl_bytes": "bytes",
}
LINES_7 = {
    "vLLM: computed": "computed",
    "vLLM: own pool": "own pool",
    "vLLM: brought": "brought",
    "tokens looked up": "looked up",
    "hit tokens": "hits",
    "chunks to load": "to load",
    "failed to load": "failed",
    "written to host": "written",
    "files in its folder": "files",
}


def told(exercise: str) -> str:
    """An exercise's text."""
    (text,) = [
        cell.source
        for cell in LAB.cells
        if cell.cell_type == "markdown" and f"## {exercise} " in cell.source
    ]
    return str(text)


def columns(exercise: str, lines: Mapping[str, str]) -> list[dict[str, int]]:
    """The columns of an exercise's table, from left to right."""
    text = told(exercise)
    rows = [line[1:-1].split("|") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    found: list[dict[str, int]] = [{} for _ in rows[0][1:]]
    for start, name in lines.items():
        (row,) = [row for row in rows if start in row[0]]
        for column, cell in zip(found, row[1:], strict=True):
            column[name] = int(cell.strip().replace(",", "") or 0)
    return found
