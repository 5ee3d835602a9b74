"""Every system of the course, live on one request: what `kvlab engines look` runs.

The request is the same for all: a question of 401 tokens. What keeps KV gets the follow-up too, and
once more after the engine's own cache was emptied. Who has its KV then? Each `look` starts its
system, asks, ends it, and gives back what it saw as plain numbers. results/systems.json keeps what
was seen, where, when.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvlab import environments, report
from kvlab.engines.process import Scratch, System
from kvlab.engines.protocol import Completion, Counting, Engine, EngineError
from kvlab.measure import settled
from kvlab.paths import ROOT, SetupError

RECORD = ROOT / "results" / "systems.json"
MODEL = "tiny-random"
PROMPT = [random.Random(1).randrange(10, 250) for _ in range(401)]
"""The question."""
SECOND_QUESTION = [random.Random(2).randrange(10, 250) for _ in range(40)]
OUTPUT = 8

Seen = dict[str, int | bool]


@dataclass(frozen=True)
class Entry:
    """A system that the course runs."""

    name: str
    setup: str
    """What runs while it is looked at, by the calls of kvlab.engines that start it."""
    role: str
    package: str
    """The distribution whose version counts; "" for minikv, which is the checkout's."""
    environment: str
    look: Callable[[], Seen]

    def version(self, device: str) -> str:
        """The pinned version, from the environment's pins file."""
        if not self.package:
            return "this checkout"
        return environments.version(self.package, self.environment, device)


def ask(engine: Engine, prompt: list[int] = PROMPT) -> Completion:
    return engine.generate(prompt, max_tokens=OUTPUT, ignore_eos=True)


def reset(engine: Engine) -> None:
    """Empty the engine's own cache; what ran a moment ago may still hold blocks."""
    until = time.monotonic() + 30
    while not engine.reset_prefix_cache():
        if time.monotonic() > until:
            raise EngineError("the prefix cache could not be reset")
        time.sleep(0.1)


def conversation(engine: Engine, lasting: int = 0) -> Iterator[tuple[str, Completion]]:
    """The question, the follow-up (all of that, the answer, and a second question), and the
    follow-up once more after the engine's own cache was emptied: each with its name, as it comes.

    lasting: how many tokens outlive the reset. What stores them may do so some moments behind the
    answer: the last request is repeated until they are found. Raises EngineError if they are not
    found in half a minute.
    """
    first = ask(engine)
    yield "question", first
    prompt = PROMPT + first.token_ids + SECOND_QUESTION
    yield "follow-up", ask(engine, prompt)
    until = time.monotonic() + 30
    while True:
        reset(engine)
        last = ask(engine, prompt)
        if last.cached_tokens >= lasting:
            break
        if time.monotonic() > until:
            raise EngineError(f"{last.cached_tokens} tokens outlived the reset, not {lasting}.")
        time.sleep(1)
    yield "after a reset", last


def counted(answers: dict[str, Completion]) -> Seen:
    """A conversation's cached tokens, and whether the follow-up had the same answer twice."""
    again, last = answers["follow-up"], answers["after a reset"]
    return {
        "question": answers["question"].cached_tokens,
        "follow_up": again.cached_tokens,
        "after_reset": last.cached_tokens,
        "same_answer": again.token_ids == last.token_ids,
    }


def _talk(engine: Engine, lasting: int = 0) -> Seen:
    return counted(dict(conversation(engine, lasting)))


@contextlib.contextmanager
def naming(*systems: System) -> Iterator[None]:
    """Inside the `with` block these systems work together; an error then names those of them that
    have ended, for an engine whose cache is gone only says that it found nothing."""
    try:
        yield
    except EngineError as error:
        ended = [one for one in systems if not one.is_alive and one.name not in str(error)]
        if not ended:
            raise
        told = ", ".join(f"{one.name} (its log: {one.log})" for one in ended)
        raise EngineError(f"{error} Ended meanwhile: {told}.", error.log) from error


def _count(engine: Counting, name: str) -> int:
    """One of its counters, once that stands still; 0 where it has never moved."""
    return int(settled(lambda: engine.metrics().get(name, 0)))


def _minikv() -> Seen:
    from kvlab.engines import minikv

    with minikv.start(MODEL) as engine:
        return _talk(engine)


def _vllm() -> Seen:
    from kvlab.engines import vllm

    with vllm.start(MODEL) as engine:
        return _talk(engine)


def _sglang() -> Seen:
    from kvlab.engines import sglang

    with sglang.start(MODEL) as engine:
        return _talk(engine)


def _hicache() -> Seen:
    from kvlab.engines import sglang

    with Scratch() as folder, sglang.start(MODEL, hicache=sglang.HiCache(folder=folder)) as engine:
        return _talk(engine, lasting=448)


def _lmcache() -> Seen:
    from kvlab.engines import lmcache, vllm

    with (
        lmcache.start() as cache,
        vllm.start(MODEL, connector=cache.connector()) as engine,
        naming(cache, engine),
    ):
        return _talk(engine, lasting=384)


def _store() -> Seen:
    from kvlab.engines import mooncake, vllm, vllm_connectors

    with (
        mooncake.start() as master,
        master.client(segment_bytes=128 << 20) as holder,
        vllm.start(MODEL, connector=vllm_connectors.to_mooncake(master)) as engine,
        naming(master, holder, engine),
    ):
        return _talk(engine, lasting=448) | {"objects": int(master.metrics()["master_key_count"])}


def _transfer_engine() -> Seen:
    from kvlab.engines import transfer_engine

    with transfer_engine.start(1 << 20) as a, transfer_engine.start(1 << 20) as b, naming(a, b):
        b.register()
        a.register()
        a.fill(0, bytes(PROMPT))
        a.write(b, length=len(PROMPT))
        return {"bytes": len(PROMPT), "same_bytes": b.look(0, len(PROMPT)) == bytes(PROMPT)}


def _nixl() -> Seen:
    from kvlab.engines import vllm_pd

    with vllm_pd.start(MODEL) as pair, naming(pair.prefill, pair.decode):
        answer, alone = ask(pair), ask(pair.prefill)
        head = 'vllm:prompt_tokens_by_source_total{source="%s"}'
        return {
            "computed_by_decode": _count(pair.decode, head % "local_compute"),
            "transferred": _count(pair.decode, head % "external_kv_transfer"),
            "same_answer": answer.token_ids == alone.token_ids,
        }


def _sglang_pair() -> Seen:
    from kvlab.engines import sglang, sglang_pd

    with sglang_pd.start(MODEL) as pair, naming(pair.prefill, pair.decode, pair.front):
        answer = ask(pair)
        counted = 'sglang:realtime_tokens_total{mode="prefill_compute"}'
        seen: Seen = {
            "computed_by_prefill": _count(pair.prefill, counted),
            "computed_by_decode": _count(pair.decode, counted),
        }
    with sglang.start(MODEL) as alone:
        return seen | {"same_answer": answer.token_ids == ask(alone).token_ids}


def _router() -> Seen:
    from kvlab.engines import router, sglang

    with sglang.start(MODEL) as a, sglang.start(MODEL) as b:
        seen: Seen = {}
        for policy in ("round_robin", "cache_aware"):
            reset(a)
            reset(b)
            with router.start([a, b], policy=policy) as front, naming(a, b, front):
                seen[policy] = sum(ask(front).cached_tokens for _ in range(4))
        return seen


SYSTEMS = (
    Entry("minikv", "`minikv.start()`", "engine", "", "notebook", _minikv),
    Entry("vLLM", "`vllm.start()`", "engine", "vllm", "vllm", _vllm),
    Entry("SGLang", "`sglang.start()`", "engine", "sglang", "sglang", _sglang),
    Entry(
        "HiCache",
        "`sglang.start(hicache=...)`, with a folder",
        "tiers below SGLang's radix tree",
        "sglang",
        "sglang",
        _hicache,
    ),
    Entry(
        "LMCache",
        "`lmcache.start()`, `vllm.start(connector=...)`",
        "KV cache beside engines",
        "lmcache",
        "vllm",
        _lmcache,
    ),
    Entry(
        "Mooncake Store",
        "`mooncake.start()`, its `client()`, `vllm.start(connector=...)`",
        "object store for KV",
        "mooncake-transfer-engine",
        "vllm",
        _store,
    ),
    Entry(
        "Mooncake Transfer Engine",
        "`transfer_engine.start()`, twice",
        "memory to memory",
        "mooncake-transfer-engine",
        "vllm",
        _transfer_engine,
    ),
    Entry(
        "NIXL",
        "`vllm_pd.start()`: two vLLMs",
        "carries the handoff of a vLLM pair",
        "nixl",
        "vllm",
        _nixl,
    ),
    Entry(
        "SGLang pair",
        "`sglang_pd.start()`: two SGLangs, a router",
        "prefill/decode handoff over Mooncake",
        "sglang",
        "sglang",
        _sglang_pair,
    ),
    Entry(
        "sglang-router",
        "`sglang.start()`, twice; `router.start()`",
        "chooses a replica",
        "sglang-router",
        "router",
        _router,
    ),
)


def run(names: list[str], say: Callable[[str], None] = print) -> dict[str, Seen]:
    """Look at these systems (all, if none is named); what was seen, by name.

    One that fails is told and left out. Raises SetupError for a name that is none.
    """
    known = {system.name.lower(): system for system in SYSTEMS}
    for name in names:
        if name.lower() not in known:
            raise SetupError(f"No system is called {name!r}. There are {', '.join(known)}.")
    seen = {}
    for system in [known[name] for name in dict.fromkeys(map(str.lower, names))] or SYSTEMS:
        try:
            seen[system.name] = system.look()
        except (EngineError, SetupError) as error:
            say(f"{system.name} failed: {error}")
        else:
            say(f"{system.name}: {told(seen[system.name])}")
    return seen


def told(seen: Seen) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in seen.items())


def record(seen: dict[str, Seen]) -> None:
    """Add what was seen to results/systems.json, under this device."""
    device, gpu = environments.device(), environments.gpu()
    devices = json.loads(RECORD.read_text())["values"]["devices"] if RECORD.exists() else {}
    for system in SYSTEMS:
        if system.name in seen:
            devices.setdefault(device, {})[system.name] = {
                "setup": system.setup,
                "version": system.version(device),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "hardware": "CPU" if isinstance(gpu, str) or device == "cpu" else gpu.name,
                "host": report.host(),
                "seen": seen[system.name],
            }
    rows = [
        {
            "system": name,
            "set-up": found["setup"],
            "version": found["version"],
            "seen": told(found["seen"]),
            "on": f"{found['hardware']}, {found['date']}",
        }
        for known in devices.values()
        for name, found in known.items()
    ]
    report.record(
        RECORD.stem,
        "every system on one request of 401 prompt tokens: shared/kvlab/systems.py",
        {"model": MODEL, "dtype": "float32", "output tokens": OUTPUT},
        {"systems": rows, "devices": devices},
    )


def seen_on(device: str) -> dict[str, Any]:
    """What results/systems.json says of a device: {system: {"version", "date", "seen"}}."""
    if not RECORD.exists():
        return {}
    found: dict[str, Any] = json.loads(RECORD.read_text())["values"]["devices"].get(device, {})
    return found


def rows() -> list[tuple[str, str, str, str, str]]:
    """For the doctor: system, what it is, pinned version, seen on a CPU, seen on CUDA."""

    def told_of(system: Entry, device: str) -> str:
        found = seen_on(device).get(system.name)
        if found is None:
            return "not seen"
        moved = "" if found["version"] == system.version(device) else f" (as {found['version']})"
        return f"{found['date']}{moved}"

    device = environments.device()
    return [
        (s.name, s.role, s.version(device), told_of(s, "cpu"), told_of(s, "cuda")) for s in SYSTEMS
    ]


def print_table() -> None:
    """Print the table of systems."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Systems, and where the course has seen them run", title_justify="left")
    for heading in ("system", "what it is", "pinned", "seen on a CPU", "seen on CUDA"):
        table.add_column(heading, overflow="fold")
    for row in rows():
        table.add_row(*row)
    Console().print(table)
