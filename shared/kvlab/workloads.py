"""What is asked, and when: requests drawn from a seed, or read from a trace.

Three things vary on their own: when requests arrive, how long prompts and outputs are, and what
prompts share. `make` draws all three; `Workload.manifest` says what was drawn and what of it an
unlimited cache would reuse, so that a result can say what it is a result of.

    from kvlab import workloads as w

    load = w.make(
        arrivals=w.Poisson(rate=2),
        prompts=w.Families(families=4, shared=256, own=w.Fixed(32)),
        outputs=w.LogNormal(median=20, sigma=0.5, most=64),
        count=100,
        seed=1,
    )

Prompts are token ids drawn at random: how long they are and what they share is what caches and
schedulers see of a text. They say nothing of what a model would answer to real ones.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Rng = np.random.Generator

FIRST_TOKEN = 10
"""Ids below are special tokens in the course's models."""
VOCABULARY = 250
"""Ids that are drawn lie below: every model of the course knows them."""


_LONGEST = 10_000_000
"""Tokens of a prompt that a trace may have: ten times what any model takes."""


class WorkloadError(ValueError):
    """A workload that cannot be drawn, or a trace that cannot be read; the message says why."""


# When requests arrive. Each `times` gives `count` moments in seconds, in order.


class Arrivals(Protocol):
    def times(self, count: int, rng: Rng) -> list[float]: ...


@dataclass(frozen=True)
class Poisson:
    """Independent users: gaps are exponential, `rate` requests a second on average."""

    rate: float

    def times(self, count: int, rng: Rng) -> list[float]:
        return Gamma(self.rate, cv=1).times(count, rng)


@dataclass(frozen=True)
class Gamma:
    """Gaps whose standard deviation is `cv` times their mean: 1 is Poisson, more comes in bursts,
    less is more even, 0 is a metronome."""

    rate: float
    cv: float

    def times(self, count: int, rng: Rng) -> list[float]:
        _positive("rate", self.rate)
        if self.cv < 0:
            raise WorkloadError(f"cv is a spread, 0 or more, and not {self.cv}.")
        if self.cv == 0:
            gaps = np.full(count, 1 / self.rate)
        else:
            shape = self.cv**-2
            gaps = rng.gamma(shape, 1 / (self.rate * shape), count)
        times: list[float] = np.cumsum(gaps).tolist()
        return times


@dataclass(frozen=True)
class OnOff:
    """Poisson at `rate` for `on` seconds, silence for `off` seconds, and again."""

    rate: float
    on: float
    off: float

    def times(self, count: int, rng: Rng) -> list[float]:
        _positive("on", self.on)
        busy = Poisson(self.rate).times(count, rng)
        return [at + math.floor(at / self.on) * self.off for at in busy]


@dataclass(frozen=True)
class Times:
    """Given moments, in seconds: of a trace, say, or all of them 0."""

    at: tuple[float, ...]

    def times(self, count: int, rng: Rng) -> list[float]:
        if len(self.at) < count:
            raise WorkloadError(f"{count} requests are to come at {len(self.at)} given moments.")
        return sorted(self.at)[:count]


# How long something is. Each `draw` gives `count` numbers of tokens.


class Lengths(Protocol):
    def draw(self, count: int, rng: Rng) -> list[int]: ...


@dataclass(frozen=True)
class Fixed:
    tokens: int

    def draw(self, count: int, rng: Rng) -> list[int]:
        _positive("tokens", self.tokens)
        return [self.tokens] * count


@dataclass(frozen=True)
class LogNormal:
    """Many short ones and a few long ones; none longer than `most`, none shorter than 1."""

    median: float
    sigma: float
    most: int

    def draw(self, count: int, rng: Rng) -> list[int]:
        _positive("median", self.median)
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        lengths: list[int] = np.clip(np.rint(drawn), 1, self.most).astype(int).tolist()
        return lengths


@dataclass(frozen=True)
class Observed:
    """Lengths that were seen, drawn with replacement."""

    seen: tuple[int, ...]

    def draw(self, count: int, rng: Rng) -> list[int]:
        if not self.seen:
            raise WorkloadError("There are no lengths to draw from.")
        lengths: list[int] = rng.choice(np.array(self.seen), count).tolist()
        return lengths


# What prompts share. Each `draw` gives `count` prompts, and for each the group that it shares with.


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    group: str


class Prompts(Protocol):
    def draw(self, count: int, rng: Rng) -> list[Prompt]: ...


def _tokens(length: int, rng: Rng) -> list[int]:
    drawn: list[int] = rng.integers(FIRST_TOKEN, VOCABULARY, length).tolist()
    return drawn


@dataclass(frozen=True)
class Unrelated:
    """Prompts that share nothing: what a cache cannot help."""

    length: Lengths

    def draw(self, count: int, rng: Rng) -> list[Prompt]:
        lengths = self.length.draw(count, rng)
        return [Prompt(_tokens(n, rng), f"alone {i}") for i, n in enumerate(lengths)]


@dataclass(frozen=True)
class Families:
    """Documents with questions: each prompt is one of `families` beginnings of `shared` tokens,
    drawn evenly, and an end of its `own`."""

    families: int
    shared: int
    own: Lengths

    def draw(self, count: int, rng: Rng) -> list[Prompt]:
        return HotSet(self.families, self.families, 1, count, self.shared, self.own).draw(
            count, rng
        )


@dataclass(frozen=True)
class HotSet:
    """Families of which `hot` ones get `share` of the requests; others take their place after
    every `switch` requests."""

    families: int
    hot: int
    share: float
    switch: int
    shared: int
    own: Lengths

    def draw(self, count: int, rng: Rng) -> list[Prompt]:
        if not 1 <= self.hot <= self.families:
            raise WorkloadError(f"{self.hot} of {self.families} families cannot be hot.")
        if not 0 <= self.share <= 1:
            raise WorkloadError(f"share lies between 0 and 1, and is not {self.share}.")
        _positive("switch", self.switch)
        starts = [_tokens(self.shared, rng) for _ in range(self.families)]
        prompts = []
        for i, own in enumerate(self.own.draw(count, rng)):
            first = i // self.switch * self.hot
            cold = self.families - self.hot
            if cold == 0 or rng.random() < self.share:
                offset = int(rng.integers(self.hot))
            else:
                offset = self.hot + int(rng.integers(cold))
            family = (first + offset) % self.families
            prompts.append(Prompt(starts[family] + _tokens(own, rng), f"family {family}"))
        return prompts


@dataclass(frozen=True)
class Tree:
    """Beginnings that fork: `levels` holds (branches, tokens) from the root on, and a prompt is one
    path down and an end of its `own`. ((1, 100), (3, 50)): all share 100, a third of them 150."""

    levels: tuple[tuple[int, int], ...]
    own: Lengths

    def draw(self, count: int, rng: Rng) -> list[Prompt]:
        pieces: dict[tuple[int, ...], list[int]] = {}
        prompts = []
        for own in self.own.draw(count, rng):
            path: tuple[int, ...] = ()
            tokens: list[int] = []
            for branches, length in self.levels:
                _positive("branches", branches)
                path += (int(rng.integers(branches)),)
                if path not in pieces:
                    pieces[path] = _tokens(length, rng)
                tokens += pieces[path]
            prompts.append(Prompt(tokens + _tokens(own, rng), "/".join(map(str, path))))
        return prompts


@dataclass(frozen=True)
class Chats:
    """Conversations: each prompt is all that was said before and one turn more. They take turns:
    the first turn of all `chats`, then the second, and so on.

    The answers in the history are made up, `answer` tokens long, and not what the engine said: so
    that a workload is the same whoever serves it. Of an answer's KV an engine then has nothing.
    """

    chats: int
    system: int
    """tokens of a beginning that all chats share"""
    turn: Lengths
    answer: Lengths

    def draw(self, count: int, rng: Rng) -> list[Prompt]:
        _positive("chats", self.chats)
        system = _tokens(self.system, rng)
        history = [list(system) for _ in range(self.chats)]
        turns, answers = self.turn.draw(count, rng), self.answer.draw(count, rng)
        prompts = []
        for i, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
            said = history[i % self.chats]
            said += _tokens(turn, rng)
            prompts.append(Prompt(list(said), f"chat {i % self.chats}"))
            said += _tokens(answer, rng)
        return prompts


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise WorkloadError(f"{name} has to be more than 0, and is {value}.")


# The workload.


@dataclass(frozen=True)
class Request:
    at: float
    """seconds after the start at which it is to be sent"""
    prompt: list[int]
    output: int
    """tokens that the engine is to generate"""
    group: str = ""
    """what it shares its beginning with"""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, and how they were made."""

    requests: list[Request]
    made_by: dict[str, Any]

    def manifest(self, block_size: int = 32) -> dict[str, Any]:
        """What a result says of its workload: enough to make it again, and to see that it is the
        same one. `block_size`: of the unlimited cache whose reuse is counted."""
        prompts = [request.prompt for request in self.requests]
        content = [(r.at, r.prompt, r.output) for r in self.requests]
        return {
            "made_by": self.made_by,
            "requests": len(self.requests),
            "seconds": round(self.requests[-1].at, 3) if self.requests else 0,
            "prompt_tokens": sum(map(len, prompts)),
            "output_tokens": sum(request.output for request in self.requests),
            "block_size": block_size,
            "reusable_tokens": sum(reusable(prompts, block_size)),
            "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        }


def make(
    *, arrivals: Arrivals, prompts: Prompts, outputs: Lengths, count: int, seed: int
) -> Workload:
    """Draw `count` requests. Arrivals, prompts and outputs have generators of their own, so that
    changing one of them leaves the others as they were. Raises WorkloadError."""
    _positive("count", count)
    try:
        when, what, how_long = (np.random.default_rng([seed, part]) for part in range(3))
        times, drawn = arrivals.times(count, when), prompts.draw(count, what)
        lengths = outputs.draw(count, how_long)
    except WorkloadError:
        raise
    except (ValueError, TypeError, ArithmeticError) as error:  # numpy's, of a spread below 0, say
        raise WorkloadError(f"This cannot be drawn: {error}.") from error
    if not all(math.isfinite(at) and at >= 0 for at in times) or times != sorted(times):
        raise WorkloadError("These arrivals give moments that are none, or not in order.")
    if not all(isinstance(length, int) and length >= 1 for length in lengths):
        raise WorkloadError("These outputs give lengths that are no whole numbers from 1 on.")
    if not all(prompt.tokens for prompt in drawn):
        raise WorkloadError("These prompts are empty.")
    parts = zip(times, drawn, lengths, strict=True)
    made_by = {"seed": seed, "count": count}
    for name, part in (("arrivals", arrivals), ("prompts", prompts), ("outputs", outputs)):
        made_by[name] = _told(part)
    return Workload([Request(at, p.tokens, out, p.group) for at, p, out in parts], made_by)


def _told(part: Any) -> Any:
    """A part as JSON: its class and its fields."""
    if not dataclasses.is_dataclass(part):
        return part
    fields = {f.name: _told(getattr(part, f.name)) for f in dataclasses.fields(part)}
    return {"kind": type(part).__name__} | fields


def reusable(prompts: Iterable[Sequence[int]], block_size: int) -> Iterator[int]:
    """For each prompt, how many of its tokens a cache would hold that kept all those before it.

    Whole blocks from the start, as far as they are known; the last token never counts, because an
    engine has to compute at least one. A cache that is full holds less, and so does one that is
    asked before the earlier request was computed.
    """
    _positive("block_size", block_size)
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for prompt in prompts:
        parent, hit, missed = 0, 0, False
        for start in range(0, len(prompt) - block_size + 1, block_size):
            block = (parent, tuple(prompt[start : start + block_size]))
            missed = missed or block not in known
            if not missed and start + block_size < len(prompt):
                hit += block_size
            parent = known.setdefault(block, len(known) + 1)
        yield hit


# Traces of others.


@dataclass(frozen=True)
class TraceRequest:
    """A line of a trace: lengths, and where the trace has them, ids of blocks in place of text."""

    at: float
    """seconds after the first one"""
    input: int
    output: int
    blocks: tuple[int, ...] = ()


MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for; the last one of a prompt fewer."""


def read(path: Path) -> list[TraceRequest]:
    """Read a trace in the form of Mooncake (JSON lines), Azure or vidur (CSV).

    Mooncake: timestamp in ms, input_length, output_length, hash_ids
    (kvcache-ai/Mooncake, FAST25-release/traces). Azure: TIMESTAMP, ContextTokens, GeneratedTokens
    (Azure/AzurePublicDataset, 2023). vidur: arrived_at in s, num_prefill_tokens, num_decode_tokens
    (microsoft/vidur, data/processed_traces). Requests come in the order of their times, of
    the same time in that of the file.

    Raises WorkloadError that names the line.
    """
    try:
        # Some tools write a byte order mark in front.
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                rows = [
                    _mooncake(line, f"{path}:{i}") for i, line in enumerate(file, 1) if line.strip()
                ]
            elif "ContextTokens" in first or "num_prefill_tokens" in first:
                table = csv.DictReader(file)
                rows = [_csv(row, f"{path}:{table.line_num}") for row in table]
            else:
                raise WorkloadError(
                    f"{path}: neither JSON lines as Mooncake has them, nor a CSV with the columns "
                    "of Azure or vidur."
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise WorkloadError(f"{path} holds no request.")
    rows.sort(key=lambda row: row.at)  # a stable sort
    begin = rows[0].at
    return [dataclasses.replace(row, at=row.at - begin) for row in rows]


def _mooncake(line: str, where: str) -> TraceRequest:
    try:
        row = json.loads(line)
        found = TraceRequest(
            at=row["timestamp"] / 1000,
            input=int(row["input_length"]),
            output=int(row["output_length"]),
            blocks=tuple(map(int, row["hash_ids"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WorkloadError(f"{where}: {type(error).__name__} {error}") from error
    if not 1 <= found.input <= _LONGEST or found.output < 0 or min(found.blocks, default=0) < 0:
        raise WorkloadError(f"{where}: a length or a hash id that cannot be.")
    if not math.isfinite(found.at):
        raise WorkloadError(f"{where}: {found.at} is no moment.")
    if len(found.blocks) != -(-found.input // MOONCAKE_BLOCK):
        raise WorkloadError(
            f"{where}: {found.input} tokens are not {len(found.blocks)} blocks of {MOONCAKE_BLOCK}."
        )
    return found


def _csv(row: dict[str, str], where: str) -> TraceRequest:
    try:
        if "TIMESTAMP" in row:
            # seven digits of a second, of which datetime takes six
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            at = moment.replace(tzinfo=datetime.UTC).timestamp()
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        else:
            at = float(row["arrived_at"])
            lengths = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WorkloadError(f"{where}: {type(error).__name__} {error}") from error
    if not (math.isfinite(at) and 1 <= lengths[0] <= _LONGEST and lengths[1] >= 0):
        raise WorkloadError(f"{where}: a moment or a length that cannot be.")
    return TraceRequest(at, *lengths)


def from_trace(
    path: Path, *, limit: int | None = None, speed: float = 1, shrink: float = 1, seed: int = 0
) -> Workload:
    """A trace as a workload: the same arrivals, lengths and sharing, with tokens drawn by `seed`.

    limit: the first so many requests; speed: 2 sends them in half the time; shrink: 32 makes every
    length a 32nd (rounded up), for a small model. Blocks shrink alike, so that the share that can
    be reused stays, but for the rounding. Raises WorkloadError.
    """
    _positive("speed", speed)
    _positive("shrink", shrink)
    rows = read(path)[:limit]
    block = math.ceil(MOONCAKE_BLOCK / shrink)
    content: dict[int, list[int]] = {}
    requests = []
    for i, row in enumerate(rows):
        length = math.ceil(row.input / shrink)
        if row.blocks:
            prompt: list[int] = []
            for name in row.blocks:
                if name not in content:
                    content[name] = _tokens(block, np.random.default_rng([seed, name]))
                prompt += content[name]
            prompt = prompt[:length]
        else:  # without ids nothing is known to be shared
            prompt = _tokens(length, np.random.default_rng([seed, i]))
        output = max(1, math.ceil(row.output / shrink))
        requests.append(Request(row.at / speed, prompt, output, f"line {i + 1}"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made_by = {"trace": path.name, "trace_sha256": digest, "seed": seed, "limit": limit}
    return Workload(requests, made_by | {"speed": speed, "shrink": shrink})
