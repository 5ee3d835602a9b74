"""The counters that lab 06 shows are those of the real systems: each table, lived through again."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

from engine_help import need, within
from lab_06_tables import LAB, LINES_4, LINES_7, columns

from kvlab.engines import lmcache, vllm
from kvlab.engines.lmcache import LMCache
from kvlab.engines.vllm import VLLM
from kvlab.exercises import lab_06
from kvlab.follow import Watch
from kvlab.systems import MODEL, PROMPT, SECOND_QUESTION

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

    def ask(
        self, salt: str | None = None, prompt: list[int] = PROMPT, max_tokens: int = 8
    ) -> dict[str, int]:
        answer = self.engine.generate(
            prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt=salt
        )
        self.answered = answer.token_ids
        moved = {name: n for name, n in self.watch.moved().items() if isinstance(n, int)}
        return moved | {"files": len(self.files())}

    def files(self) -> list[Path]:
        return list(self.folder.rglob("*.data"))


def agree(lived: dict[str, int], told: dict[str, int]) -> None:
    assert {name: lived.get(name, 0) for name in told} == told


def test_what_the_tables_show_is_what_the_systems_count(tmp_path: Path) -> None:
    """Column D of 06.4 and set-up E of 06.7 are in test_connectors.py."""
    need("vllm")
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


def test_the_pages_of_thirteen_requests_are_those_of_the_systems(tmp_path: Path) -> None:
    need("vllm")
    names = lab_06.pages()[-1]  # all that ever moved
    with (
        lmcache.start(folder=tmp_path) as cache,
        vllm.start(MODEL, connector=cache.connector(), max_model_len=4096) as engine,
    ):
        lived = Lived(engine, cache, tmp_path)

        def page() -> dict[str, float]:
            now = engine.metrics() | cache.metrics()
            return {name: now[name] for name in names if name in now}

        found = [page()]

        def ask(prompt: list[int], *, salt: str | None = None, max_tokens: int = 8) -> list[int]:
            lived.ask(salt, prompt, max_tokens)
            found.append(page())
            return [*prompt, *lived.answered]

        follow_up = ask(PROMPT) + SECOND_QUESTION
        ask(follow_up)
        lived.forget(host=False)
        ask(follow_up)
        ask(PROMPT, salt="a")
        ask(PROMPT, salt="a")
        lived.forget()
        ask(PROMPT)
        long = tokens(61, 3073)
        ask(long)
        keys = [key.hex() for key in lmcache.chunk_keys(long, 128)]
        for gap in (23, 12):
            (file,) = tmp_path.rglob(f"*{keys[gap]}.data")
            file.unlink()
            lived.forget()
            ask(long)
        ask(long)
        follow_up = ask(tokens(62, 706), max_tokens=20) + tokens(63, 34)
        ask(follow_up, max_tokens=20)
        ask(follow_up, max_tokens=20)
    # A counter that has not moved may be on a page as 0, or not yet.
    moved = [{name: n for name, n in page.items() if n} for page in found]
    assert moved == [{name: n for name, n in page.items() if n} for page in lab_06.pages()]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(count)]


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
