"""Chapter 06 follows one request through every system: the request, and who answered it.

The conversation is that of `kvlab.systems`; its question is seen as a document of 360 tokens and a
question of 41. What happened to each request is read off counters, before and after: `Watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvlab import environments, memory, systems
from kvlab.engines.protocol import Counting, Engine
from kvlab.measure import gained, settled
from kvlab.pictures.path import Count, PathPicture
from kvlab.systems import PROMPT, Seen

DOCUMENT, QUESTION = PROMPT[:360], PROMPT[360:]


Counter = tuple[Counting, str] | tuple[Counting, str, float]
"""A system, the name of one of its counters, and a factor (1 if there is none). A name without
labels stands for the sum of all that have it."""


class Watch:
    """How far counters have moved since they were last looked at.

    counters: one or a tuple of them for each place of `kvlab.pictures.PathPicture`.
    """

    def __init__(self, counters: Mapping[str, Counter | tuple[Counter, ...]]) -> None:
        self._counters = dict(counters)
        self._before = self._read()

    def moved(self) -> dict[str, Count]:
        """The difference to the last call, once the counters stand still.

        Raises EngineError if they do not, or if one went back: its system was started anew.
        """
        now = settled(self._read)
        before, self._before = self._before, now
        return {place: self._difference(place, before, now) for place in self._counters}

    def _difference(
        self, place: str, before: Mapping[str, list[int]], now: Mapping[str, list[int]]
    ) -> Count:
        moved = tuple(
            int(gained(f"A counter of {place!r}", a, b))
            for a, b in zip(before[place], now[place], strict=True)
        )
        return moved if isinstance(self._counters[place][0], tuple) else moved[0]

    def _read(self) -> dict[str, list[int]]:
        pages: dict[int, dict[str, float]] = {}
        found: dict[str, list[int]] = {}
        for place, counters in self._counters.items():
            several = counters if isinstance(counters[0], tuple) else (counters,)
            found[place] = []
            for system, name, *factor in several:
                if id(system) not in pages:
                    pages[id(system)] = system.metrics()
                found[place].append(round(_value(pages[id(system)], name) * (*factor, 1)[0]))
        return found


def _value(page: Mapping[str, float], name: str) -> float:
    if name in page or "{" in name:
        return page.get(name, 0)
    return sum(value for key, value in page.items() if key.startswith(name + "{"))


def talk(engine: Engine, watch: Watch, path: PathPicture) -> Seen:
    """Have the conversation: each request lights the path, and is told in a line.

    Gives the cached tokens of all three.
    """
    answers = {}
    for event, answer in systems.conversation(engine):
        path.note(event, watch.moved())
        print(f"{event}: {answer.cached_tokens} of {answer.prompt_tokens} tokens cached")
        print(path.told())
        answers[event] = answer
    return systems.counted(answers)


def live(name: str, look: Callable[[], Seen], *, gb: float = 3) -> Seen:
    """What `look` saw of a system; where this machine cannot run it, what results/systems.json
    has of it, with "recorded" set, and lines that say so.

    gb: how many GB of memory have to be free, each 1e9 bytes.
    """
    try:
        if memory.available() < gb * 1e9:
            reason = f"it wants {gb:g} GB of free memory"
        else:
            return look()
    except environments.EnvironmentMissing as missing:
        reason = str(missing).partition(":")[0]
    found = systems.seen_on("cpu")[name]
    print(f"NOT RUN HERE: {reason}")
    print(f"As recorded with {name} {found['version']} ({found['hardware']}, {found['date']}):")
    print(f"    {systems.told(found['seen'])}")
    return {**found["seen"], "recorded": True}


# Who decides, owns, moves, consumes; the numbers in braces are those that a system's look gave.
_VERBS = {
    "vLLM": (
        "what runs; which blocks stay: {follow_up} tokens found again; its connector: what to load",
        "its pool: {after_reset} tokens left after a reset",
        "its connector, to and from LMCache; else NIXL or the Transfer Engine",
        "**yes**",
    ),
    "SGLang": (
        "what runs; which pages stay: {follow_up} tokens found again",
        "its pool",
        "HiCache in it; from one SGLang to another, the Transfer Engine",
        "**yes**",
    ),
    "HiCache": (
        "what goes down and comes up",
        "host memory; files: {after_reset} tokens left after a reset",
        "between device, host and files",
        "no, SGLang does",
    ),
    "LMCache": (
        "which chunks are kept and offered",
        "host memory and files: {after_reset} tokens left after a reset",
        "between host and files; to and from the device, vLLM's connector",
        "no",
    ),
    "Mooncake Store": (
        "where an object goes, which is evicted",
        "lent memory: {objects} objects after vLLM's end",
        "no, the Transfer Engine does",
        "no",
    ),
    "Mooncake Transfer Engine": (
        "nothing",
        "nothing",
        "{bytes} bytes, the same: {same_bytes}",
        "no",
    ),
    "NIXL": (
        "nothing",
        "nothing",
        "{transferred} tokens, {computed_by_decode} of them counted as computed again",
        "no",
    ),
    "SGLang pair": (
        "its router: which two sides",
        "a pool on each side",
        "by the Transfer Engine",
        "both sides: {computed_by_prefill} and {computed_by_decode} prompt tokens computed",
    ),
    "sglang-router": (
        "which replica: {round_robin} tokens found in turn, {cache_aware} by prefix",
        "nothing",
        "no",
        "no",
    ),
}


def table(reports: Mapping[str, Seen]) -> str:
    """Who decides, owns, moves and consumes, in Markdown, from what each system reported."""
    device = environments.device()
    version = {system.name: system.version(device) for system in systems.SYSTEMS}
    rows = ["| | decides | owns | moves | consumes |", "|---|---|---|---|---|"]
    for name, cells in _VERBS.items():
        seen = reports[name]
        said = {key: str(v) if isinstance(v, bool) else f"{v:,}" for key, v in seen.items()}
        mark = " (recorded, not run here)" if "recorded" in seen else ""
        told = " | ".join(cell.format(**said) for cell in cells)
        rows.append(f"| {name} {version[name]}{mark} | {told} |")
    return "\n".join(rows)
