"""The counters that lab 06 shows are those of the real systems: each table, lived through again."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from engine_help import need, within

from kvlab import notebooks
from kvlab.engines import lmcache, vllm
from kvlab.engines.lmcache import LMCache
from kvlab.engines.vllm import VLLM
from kvlab.exercises import lab_06
from kvlab.follow import Watch
from kvlab.paths import ROOT
from kvlab.systems import MODEL, PROMPT

need("vllm")

LAB = notebooks.read(ROOT / "solutions" / "06_the_map.ipynb")
SOURCE = 'vllm:prompt_tokens_by_source_total{source="%s"}'
# What a line of a table counts: whether it is the engine's, and the counter's name.
COUNTERS = {
    "computed": (True, SOURCE % "local_compute"),
    "own pool": (True, SOURCE % "local_cache_hit"),
    "brought": (True, SOURCE % "external_kv_transfer"),
    "looked up": (False, "lmcache_mp_lookup_requested_tokens_total"),
    "hits": (False, "lmcache_mp_lookup_hit_tokens_total"),
    "hits in host memory": (False, "lmcache_mp_lookup_hit_l1_tokens_total"),
    "hits in files": (False, "lmcache_mp_lookup_hit_l2_tokens_total"),
    "to load": (False, "lmcache_mp_l2_prefetch_load_submitted_objects_chunks_total"),
    "loaded": (False, "lmcache_mp_l2_prefetch_load_completed_chunks_total"),
    "failed": (False, "lmcache_mp_l2_prefetch_failure_chunks_total"),
    "written": (False, "lmcache_mp_l1_write_chunks_total"),
}
LINES_4 = {
    "local_compute": "computed",
    "local_cache_hit": "own pool",
    "external_kv_transfer": "brought",
    "lookup_requested": "looked up",
    "hit_l1": "hits in host memory",
    "hit_l2": "hits in files",
    "load_submitted": "to load",
    "load_completed": "loaded",
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


def columns(exercise: str, lines: Mapping[str, str]) -> list[dict[str, int]]:
    """The columns of an exercise's table, from left to right."""
    (text,) = [
        cell.source
        for cell in LAB.cells
        if cell.cell_type == "markdown" and f"## {exercise} " in cell.source
    ]
    rows = [line[1:-1].split("|") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    found: list[dict[str, int]] = [{} for _ in rows[0][1:]]
    for start, name in lines.items():
        (row,) = [row for row in rows if start in row[0]]
        for column, cell in zip(found, row[1:], strict=True):
            column[name] = int(cell.strip().replace(",", "") or 0)
    return found


class Lived:
    """vLLM with LMCache, and how its counters move."""

    def __init__(self, engine: VLLM, cache: LMCache, folder: Path) -> None:
        self.engine, self.cache, self.folder = engine, cache, folder
        self.watch = Watch(
            {name: ((cache, engine)[own], counter) for name, (own, counter) in COUNTERS.items()}
        )

    def forget(self, *, host: bool = True) -> None:
        assert within(30, self.engine.reset_prefix_cache)
        if host:
            self.cache.clear()

    def ask(self, salt: str | None = None) -> dict[str, int]:
        self.watch.moved()
        self.engine.generate(PROMPT, max_tokens=8, ignore_eos=True, cache_salt=salt)
        moved = {name: int(count) for name, count in self.watch.moved().items()}  # type: ignore[call-overload]
        return moved | {"files": len(self.files())}

    def files(self) -> list[Path]:
        return list(self.folder.rglob("*.data"))


def agree(lived: dict[str, int], told: dict[str, int]) -> None:
    assert {name: lived[name] for name in told} == told


def test_what_the_tables_show_is_what_the_systems_count(tmp_path: Path) -> None:
    a, b, c, _, e, f = columns("06.4", LINES_4)
    chunks1, chunks2, well1, well2, empty1, empty2, salted1, salted2 = columns("06.7", LINES_7)
    folder, copy = tmp_path / "l2", tmp_path / "copy"
    with (
        lmcache.start(folder=folder) as cache,
        vllm.start(MODEL, connector=cache.connector()) as engine,
    ):
        lived = Lived(engine, cache, folder)
        agree(lived.ask(), b)
        agree(lived.ask(), c)
        lived.forget(host=False)
        agree(lived.ask(), f)
        lived.forget()
        agree(lived.ask(), a)
        shutil.copytree(folder, copy)
        lived.forget()
        agree(lived.ask(), well1)
        agree(lived.ask(), well2)
        for file in lived.files():
            file.write_bytes(b"")
        lived.forget()
        first = lived.ask()
        agree(first, e)
        agree(first, empty1)
        lived.forget()
        agree(lived.ask(), empty2)
        lived.forget()
        agree(lived.ask("one"), salted1)
        agree(lived.ask("another"), salted2)
    with (
        lmcache.start(folder=copy, chunk_size=256) as cache,
        vllm.start(MODEL, connector=cache.connector()) as engine,
    ):
        lived = Lived(engine, cache, copy)
        agree(lived.ask(), chunks1)
        agree(lived.ask(), chunks2)


def test_what_stands_in_for_a_missing_engine_is_what_the_lab_printed() -> None:
    printed = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in LAB.cells
        if cell.cell_type == "code" and "lab_06.RECORDED" in cell.source
    ]
    totals = [
        (line[:14].strip(), tuple(int(n.replace(",", "")) for n in line[14:].split()))
        for line in printed[0].splitlines()[1:]
        if line.strip()
    ]
    assert totals == list(lab_06.RECORDED)
    damage = [
        (name.strip(), int(cached.replace(",", "")), int(size.replace(",", "")))
        for name, cached, size in re.findall(
            r"^(.*?)cached +([\d,]+), then file 3 has +([\d,]+) bytes$", printed[1], re.MULTILINE
        )
    ]
    assert damage == list(lab_06.RECORDED_DAMAGE)
