"""Lab 06, the map: which component answered, what is broken, what does a missing chunk cost.

The counters are real: vLLM 0.32.0 (CPU build), LMCache 0.5.6, Mooncake 0.3.13.post1 and NIXL 1.5.1
with the model tiny-random, blocks of 32 tokens and chunks of 128, read before and after each event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from kvlab.check import Exercise, Wrong, number

READING = 45

_EVERYBODY = ("backend", "kernel", "cache and storage", "platform/SRE", "solutions")
_STORAGE = ("backend", "cache and storage", "platform/SRE")


def _keyed(answer: Any, keys: Sequence[str]) -> dict[str, Any]:
    """The answer, if it is a dict with just these keys."""
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"keep the keys: {', '.join(repr(key) for key in keys)}")
    return dict(answer)


def _numbers(answer: Any, keys: Sequence[str]) -> dict[str, int | float]:
    return {key: number(value, f"{key!r}") for key, value in _keyed(answer, keys).items()}


def _chosen(answer: Any, right: Mapping[str, str], choices: Sequence[str]) -> dict[str, str]:
    """The answer, if it has these keys and each value is one of the choices."""
    got = _keyed(answer, tuple(right))
    for key in right:
        if got[key] not in choices:
            raise Wrong(f"{key}: choose one of {', '.join(repr(c) for c in choices)}")
    return got


# 06.1 -----------------------------------------------------------------------

WHO = ("engine", "connector", "router", "LMCache", "Mooncake Store", "Transfer Engine")
_JOBS = {
    "computes attention with the KV": "engine",
    "throws a block out of the pool on the device": "engine",
    "cuts a prompt into chunks and makes the names of their files": "LMCache",
    "tells vLLM's scheduler how many tokens could be loaded": "connector",
    "knows in which client's memory an object lies": "Mooncake Store",
    "copies so many bytes from one address to another": "Transfer Engine",
    "sends a request to one of two replicas": "router",
}
_WHY_NOT = {
    "computes attention with the KV": "all others store, find or carry bytes. Who has a model?",
    "throws a block out of the pool on the device": "a pool is freed by whoever owns it",
    "cuts a prompt into chunks and makes the names of their files": (
        "in section 9 the file names were made from tokens, by the rule of the one who keeps them. "
        "Does an engine know of chunks of 128? Does the Store know of tokens?"
    ),
    "tells vLLM's scheduler how many tokens could be loaded": (
        "the scheduler calls a class inside of vLLM, whatever keeps the KV behind it"
    ),
    "knows in which client's memory an object lies": "who has a master?",
    "copies so many bytes from one address to another": (
        "who knows no keys and no tokens? The Store finds the place and does not carry"
    ),
    "sends a request to one of two replicas": "that is decided before any engine sees the request",
}


def _check_jobs(answer: Any) -> str:
    got = _chosen(answer, _JOBS, WHO)
    for job, who in _JOBS.items():
        if got[job] != who:
            raise Wrong(f"{job}: not the {got[job]}. {_WHY_NOT[job][0].upper()}{_WHY_NOT[job][1:]}")
    return (
        "Found, carried and usable are three things, and three components answer for them. Where "
        "one of them is asked for the other's job, it has no words for it: no tokens in the Store, "
        "no keys in the Transfer Engine."
    )


# 06.2 -----------------------------------------------------------------------

_FIRST, _ANSWER, _SECOND = 706, 20, 34
_FOLLOW_UP = _FIRST + _ANSWER + _SECOND  # 760
_PIECES = {"vLLM": 32, "SGLang": 16, "vLLM with LMCache, after a reset": 128}
"""The last one is asked when the follow-up has been computed once."""


def _whole(tokens: int, piece: int) -> int:
    return tokens // piece * piece


def _check_pieces(answer: Any) -> str:
    got = _numbers(answer, tuple(_PIECES))
    has = _FIRST + _ANSWER - 1
    right = {name: _whole(has, piece) for name, piece in _PIECES.items()}
    last = "vLLM with LMCache, after a reset"
    right[last] = _whole(_FOLLOW_UP - 1, 128)
    for name, piece in _PIECES.items():
        if got[name] == right[name]:
            continue
        if got[name] > _FOLLOW_UP:
            raise Wrong(f"{name}: more than the prompt of {_FOLLOW_UP} tokens has")
        if got[name] % piece:
            raise Wrong(f"{name}: its pieces have {piece} tokens, and a piece that is not full is")
        if name != last and got[name] == _whole(_FIRST, piece):
            raise Wrong(
                f"{name}: that is what the question alone leaves. Its answer went through the "
                "model, too, and its tokens are in the follow-up"
            )
        if name != last and got[name] > right[name]:
            raise Wrong(f"{name}: for how many tokens is there KV when the question is answered?")
        if name == last and got[name] > right[name]:
            raise Wrong(
                f"{name}: the follow-up has {_FOLLOW_UP} tokens. How many of them are in full "
                "chunks?"
            )
        raise Wrong(f"{name}: more than that is there, in pieces of {piece}")
    return (
        "KV for 706 + 19 tokens: 22 blocks, 45 pages. And LMCache's sixth chunk is not full: the "
        "larger the piece, the more of a prompt's end is computed again."
    )


# 06.3 -----------------------------------------------------------------------

_LONG, _CHUNK = 2100, 128
_GAPS = {
    "files 5 and 11 missing": 5 * _CHUNK,
    "file 11 missing, pool has 800": 11 * _CHUNK,
    "file 5 missing, pool has 800": 800,
    "file 12 missing, host memory full": 16 * _CHUNK,
}


def _check_gaps(answer: Any) -> str:
    got = _numbers(answer, tuple(_GAPS))
    for case, right in _GAPS.items():
        if got[case] == right:
            continue
        raise Wrong(f"{case}: {_why_gap(case, got[case])}")
    return (
        "Two numbers: how far the pool reaches without a gap, and how far LMCache does, whose host "
        "memory and files fill each other's gaps. The engine takes the furthest, and computes the "
        "rest. What lies behind a gap waits for nobody."
    )


def _why_gap(case: str, got: int | float) -> str:
    missing = 2 if "and" in case else 1
    if got > _whole(_LONG, _CHUNK):
        return "there are 16 full chunks in 2,100 tokens"
    if got == (16 - missing) * _CHUNK and "host" not in case:
        return (
            "those behind the gap are there, but the KV of a prompt is used from its beginning "
            "on, without a gap"
        )
    if case == "file 12 missing, host memory full":
        return "are the files asked at all, where the chunk lies in host memory?"
    if case == "file 5 missing, pool has 800" and got == 640:
        return "that is how far LMCache reaches. And vLLM's own pool?"
    if case == "file 5 missing, pool has 800" and got > 800:
        return "the pool ends at 800, and LMCache ends before it. Who would have the next token?"
    if "pool has 800" in case and got in (800 + 640, 800 + 1408):
        return "both hold the same first tokens: they do not add up"
    if case == "file 11 missing, pool has 800" and got == 800:
        return "that is what the pool has. Does LMCache go on where the pool ends?"
    if got == 1408 and missing == 2:
        return "which of the two gaps comes first?"
    if got in (6 * _CHUNK, 12 * _CHUNK):
        return "the chunks are counted from 0"
    if got % _CHUNK and got != 800:
        return "LMCache gives whole chunks of 128, and the pool has 800"
    return "count the chunks before the first gap, and look at what the pool has"


# 06.4 -----------------------------------------------------------------------

ANSWERED = (
    "nobody",
    "vLLM's own pool",
    "LMCache, host memory",
    "LMCache, files",
    "Mooncake Store",
    "another vLLM",
)
_RECORDS = {
    "A": "LMCache, files",
    "B": "nobody",
    "C": "vLLM's own pool",
    "D": "another vLLM",
    "E": "nobody",
    "F": "LMCache, host memory",
}


def _check_records(answer: Any) -> str:
    got = _chosen(answer, _RECORDS, ANSWERED)
    for name, right in _RECORDS.items():
        if got[name] != right:
            raise Wrong(f"{name}: {_WHY_RECORD.get((name, got[name])) or _WHY_ANSWERED[got[name]]}")
    return (
        "First the engine's three sources, for they say what it took; then, only if something "
        "came from outside, the others' counters, for they say who had it."
    )


_WHY_RECORD = {
    ("C", "LMCache, host memory"): (
        "LMCache had the tokens and said so. How many came from outside, by vLLM's own account?"
    ),
    ("E", "LMCache, files"): "three chunks were to be loaded. How many tokens did vLLM get?",
    ("A", "LMCache, host memory"): "which of LMCache's tiers found them?",
    ("F", "LMCache, files"): "which of LMCache's tiers found them?",
    ("D", "nobody"): "401 tokens were not computed here. Where did they come from?",
}
_WHY_ANSWERED = {
    "nobody": "was everything computed?",
    "vLLM's own pool": "that would be local_cache_hit",
    "LMCache, host memory": "where is a hit in L1 that vLLM took?",
    "LMCache, files": "where is a hit in L2 that vLLM took?",
    "Mooncake Store": "no object was asked for",
    "another vLLM": "no bytes came through NIXL",
}


# 06.5 -----------------------------------------------------------------------

Page = dict[str, float]
Answered = Callable[[Page, Page], Any]
_PARTS = ("computed", "own pool", "brought", "offered in vain")
_SOURCES = 'vllm:prompt_tokens_by_source_total{source="%s"}'
_HIT = "lmcache_mp_lookup_hit_tokens_total"


def _total(page: Page, name: str, end: str = "{") -> float:
    return sum(v for k, v in page.items() if k == name or k.startswith(name + end))


def _answered(before: Page, after: Page, flaw: str = "") -> dict[str, float]:
    """The right one; with a flaw, one with that plausible mistake."""

    def moved(name: str) -> float:
        if flaw == "one salt":
            name = name if "{" in name else name + '{cache_salt=""}'
            return after.get(name, 0) - before.get(name, 0)
        if flaw == "since the start":
            return _total(after, name)
        if flaw == "begins alike":
            return _total(after, name, end="") - _total(before, name, end="")
        return _total(after, name) - _total(before, name)

    computed = moved(_SOURCES % "local_compute")
    pool = moved(_SOURCES % "local_cache_hit")
    brought = moved(_SOURCES % "external_kv_transfer")
    hits = moved(_HIT)
    if flaw == "tiers twice":
        hits += moved("lmcache_mp_lookup_hit_l1_tokens_total")
        hits += moved("lmcache_mp_lookup_hit_l2_tokens_total")
    if flaw == "brought is hits":
        brought = hits
    if flaw == "pool and brought":
        pool += brought
    vain = hits - brought
    if flaw == "offers are vain":
        vain = hits
    if flaw == "asked in vain":
        vain = moved("lmcache_mp_lookup_requested_tokens_total") - brought
    if flaw == "the pool's are vain":
        vain = pool
    return dict(zip(_PARTS, (computed, pool, brought, vain), strict=True))


_FLAWS = {
    "since the start": (
        "counters count from the start of the system: what lies between is a difference"
    ),
    "one salt": "the same counter stands there once for each cache_salt: add them up",
    "brought is hits": "LMCache's hits are offers. What vLLM took, vLLM counts",
    "offers are vain": "in vain is what was offered and not taken",
    "asked in vain": "looked up is not found: only what was found was offered",
    "the pool's are vain": (
        "what the pool found is not what LMCache offered: their pieces differ, and their counts"
    ),
    "tiers twice": "the counter of all hits has those of L1 and L2 in it",
    "pool and brought": "own pool is what vLLM had itself",
}

# Differences, one request after the other in a real run: tokens computed, from the pool, brought;
# LMCache's tokens looked up, hits in L1, hits in L2; and the cache_salt of the request.
_EVENTS: tuple[tuple[int, int, int, int, int, int, str], ...] = (
    (401, 0, 0, 384, 0, 0, ""),
    (65, 384, 0, 384, 384, 0, ""),
    (65, 0, 384, 384, 384, 0, ""),
    (401, 0, 0, 384, 0, 0, "a"),
    (17, 384, 0, 384, 384, 0, "a"),
    (17, 0, 384, 384, 0, 384, ""),
    (3073, 0, 0, 3072, 0, 0, ""),
    (129, 0, 2944, 3072, 0, 2944, ""),
    (1537, 0, 1536, 3072, 0, 1536, ""),
    (1, 3072, 0, 3072, 0, 3072, ""),
    (706, 0, 0, 640, 0, 0, ""),
    (56, 704, 0, 640, 640, 0, ""),
    (24, 736, 0, 640, 640, 0, ""),
)


def pages() -> list[Page]:
    """The counters of vLLM and LMCache before and after each of _EVENTS.

    As LMCache 0.5.6 has it, a counter that never moved is not on the page.
    """
    page: Page = {_SOURCES % s: 0.0 for s in ("local_compute", "local_cache_hit")}
    page[_SOURCES % "external_kv_transfer"] = 0.0
    found = [dict(page)]
    for computed, pool, brought, asked, l1, l2, salt in _EVENTS:
        moves = {
            _SOURCES % "local_compute": computed,
            _SOURCES % "local_cache_hit": pool,
            _SOURCES % "external_kv_transfer": brought,
            "vllm:prompt_tokens_total": computed + pool + brought,
            f'lmcache_mp_lookup_requested_tokens_total{{cache_salt="{salt}"}}': asked,
            f'{_HIT}{{cache_salt="{salt}"}}': l1 + l2,
            f'lmcache_mp_lookup_hit_l1_tokens_total{{cache_salt="{salt}"}}': l1,
            f'lmcache_mp_lookup_hit_l2_tokens_total{{cache_salt="{salt}"}}': l2,
        }
        for name, moved in moves.items():
            if moved or name in page:
                page[name] = page.get(name, 0.0) + moved
        found.append(dict(page))
    return found


def _check_answered(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function who_answered and pass the function itself")
    known = pages()
    # Also over several requests at once, as a dashboard does.
    spans = [(i, j) for i in range(len(known)) for j in range(i + 1, len(known))]
    got = []
    for i, j in spans:
        given = answer(dict(known[i]), dict(known[j]))
        if given is None:
            raise Wrong("the result is None: is a `return` missing?")
        got.append(_numbers(given, _PARTS))
    right = [_answered(known[i], known[j]) for i, j in spans]
    if got == right:
        _judge_names(answer, known)
        return (
            f"Right for {len(_EVENTS)} requests, alone and {len(spans) - len(_EVENTS)} times "
            "several together. The three first add up to the prompt tokens; the last is what a hit "
            "rate would have bragged with."
        )
    for flaw, reason in _FLAWS.items():
        if got == [_answered(known[i], known[j], flaw) for i, j in spans]:
            raise Wrong(reason)
    at = next(n for n, (mine, wanted) in enumerate(zip(got, right, strict=True)) if mine != wanted)
    part = next(part for part in _PARTS if got[at][part] != right[at][part])
    i, j = spans[at]
    what = f"request {i + 1}" if j == i + 1 else f"requests {i + 1} to {j}"
    raise Wrong(f"{what} of the recorded ones: {part!r} is not {got[at][part]:,}")


def _judge_names(answer: Answered, known: Sequence[Page]) -> None:
    """A counter whose name begins like another's is not that one."""
    longer = _HIT + '_by_tier{tier="l1"}'
    for at, (before, after) in enumerate(pairwise(known)):
        got = _numbers(answer(before | {longer: 7.0 * at}, after | {longer: 9.0 * at}), _PARTS)
        for part, right in _answered(before, after).items():
            if got[part] != right:
                raise Wrong(
                    f"right for the recorded pages. On a page that also holds {longer} the number "
                    f"for {part!r} changes: that is another counter. Where does a name end?"
                )


# 06.6 -----------------------------------------------------------------------

# What the lab's live part printed where it ran: counters since the start (computed, own pool,
# brought; looked up, hits), and cached tokens and bytes after each accident.
RECORDED = (
    ("question", (706, 0, 0, 640, 0)),
    ("follow-up", (762, 704, 0, 1280, 640)),
    ("after a reset", (882, 704, 640, 1920, 1280)),
    ("again", (906, 1440, 640, 2560, 1920)),
)
RECORDED_DAMAGE = (
    ("deleted, first", 384, 524288),
    ("deleted, second", 2048, 524288),
    ("emptied, first", 384, 0),
    ("emptied, second", 384, 0),
)

_TAKEN = {"offered": 1920, "taken": 640, "computed without LMCache": 1546}


def _check_taken(answer: Any) -> str:
    got = _numbers(answer, tuple(_TAKEN))
    if got["offered"] != _TAKEN["offered"]:
        reason = "LMCache's own hits, in all four requests together"
        if got["offered"] == 2560:
            reason = "that many were looked up. How many were found?"
        elif got["offered"] == _TAKEN["taken"]:
            reason = "that is what vLLM took. How many did LMCache count as hits?"
        raise Wrong(f"offered: {reason}")
    if got["taken"] != _TAKEN["taken"]:
        reason = "what vLLM says came from outside of it"
        if got["taken"] == _TAKEN["offered"]:
            reason = "offered is not taken: in how many of the requests did vLLM need it?"
        elif got["taken"] == 704 + 736:
            reason = "those came from vLLM's own pool"
        raise Wrong(f"taken: {reason}")
    right = _TAKEN["computed without LMCache"]
    mine = got["computed without LMCache"]
    if mine != right:
        reason = "what vLLM computed, and what it took instead of computing it"
        if mine == 906:
            reason = "that is what it computed with LMCache"
        elif mine == 906 + 1920:
            reason = "would vLLM have computed what its own pool gave?"
        elif mine == 706 + 3 * 760:
            reason = "its own pool would still be there, between two resets"
        raise Wrong(f"computed without LMCache: {reason}")
    return (
        "A hit rate of 1,920 / 2,560 = 75%, and 640 of 1,546 tokens saved: 41%. Both are true. "
        "Only one says what LMCache was worth here."
    )


# 06.7 -----------------------------------------------------------------------

CAUSES = (
    "nothing is broken",
    "each request has a cache_salt of its own",
    "the chunk size was changed",
    "the files are there, and empty",
    "the files were deleted",
    "the client that held the objects is dead",
    "the Store's master was restarted",
    "LMCache's server has ended",
)
_BROKEN = {
    "A": "the chunk size was changed",
    "B": "nothing is broken",
    "C": "the files are there, and empty",
    "D": "each request has a cache_salt of its own",
    "E": "the client that held the objects is dead",
}


def _check_broken(answer: Any) -> str:
    got = _chosen(answer, _BROKEN, CAUSES)
    for name, right in _BROKEN.items():
        if got[name] != right:
            raise Wrong(f"{name}: {_against(name, got[name])}")
    return (
        "Four causes: no such name, a name of another user, a name without bytes, a name without "
        "a holder. To tell them apart follow the request: asked, found, loaded, taken. And E's "
        "counters say 384 brought, though all was computed: vLLM 0.32.0 counts them when the "
        "connector promises them."
    )


def _against(name: str, cause: str) -> str:
    """What speaks against a cause in one of the records."""
    if name == "E" and cause in _OF_LMCACHE:
        return "there is no LMCache in E, and no file"
    if name != "E" and cause in _OF_THE_STORE:
        return "only E has a Store"
    return _AGAINST_HERE.get((name, cause)) or _AGAINST[cause]


_OF_LMCACHE = CAUSES[1:5] + CAUSES[7:]
_OF_THE_STORE = CAUSES[5:7]
_AGAINST = {
    "nothing is broken": (
        "tokens were stored, and what came from outside in these two requests is nothing"
    ),
    "each request has a cache_salt of its own": (
        "then not even vLLM's own pool would find what the request before left there"
    ),
    "the chunk size was changed": "384 = 3 x 128 tokens are looked up, as before",
    "the files are there, and empty": "then chunks would be found, and loading them would fail",
    "the files were deleted": (
        "then there would be none to load, and what is computed would be stored again, for the "
        "next one to find"
    ),
    "LMCache's server has ended": "who answers the look-ups then?",
}
_AGAINST_HERE = {
    ("A", "the files were deleted"): (
        "three older files are still in the folder. How many of the 401 tokens were looked up?"
    ),
    ("A", "nothing is broken"): (
        "the 256 hit tokens of the second request are an offer that nobody needed; and the first?"
    ),
    ("B", "the files were deleted"): "three chunks were loaded from files",
    ("C", "the files were deleted"): (
        "there are three files, three chunks were to be loaded, and the second time is no better"
    ),
    (
        "D",
        "the files were deleted",
    ): "there are more files after each request, and nobody finds them",
    ("E", "nothing is broken"): "what became of the twelve transfers?",
    ("E", "the Store's master was restarted"): (
        "a master that was restarted knows no objects; this one found twelve"
    ),
}


# 06.8 -----------------------------------------------------------------------

_HEALS = {
    "deleted, first": 3 * _CHUNK,
    "deleted, second": 2048,
    "emptied, first": 3 * _CHUNK,
    "emptied, second": 3 * _CHUNK,
}


def _check_heals(answer: Any) -> str:
    got = _numbers(answer, tuple(_HEALS))
    for case, right in _HEALS.items():
        if got[case] == right:
            continue
        if case == "emptied, second":
            raise Wrong(
                f"{case}: before LMCache's file adapter writes a file, it looks whether there is "
                "one of that name. What does it find?"
            )
        if got[case] == 2048 - _CHUNK:
            raise Wrong(f"{case}: what of the chunks behind the gap?")
        if case == "deleted, second":
            raise Wrong(f"{case}: what did vLLM compute the first time, and who got it?")
        if got[case] == 4 * _CHUNK:
            raise Wrong(f"{case}: the chunks are counted from 0")
        if case == "emptied, first" and got[case] == 2048:
            raise Wrong(f"{case}: the name is there. And the 524,288 bytes?")
        raise Wrong(f"{case}: how many chunks lie before number 3?")
    return (
        "What is missing heals itself; what is there and wrong does not (LMCache 0.5.6, "
        "fs_l2_adapter.py: a file that exists is not written again). So a disk that was full once "
        "costs the same computation on each day after it, until somebody deletes the empty file."
    )


EXERCISES = (
    Exercise(
        id="06.1",
        title="Whose job is it?",
        minutes=6,
        difficulty=1,
        kind="explain",
        roles=_EVERYBODY,
        check=_check_jobs,
        hints=(
            "Who knows tokens? Who knows names? Who knows addresses?",
            "The connector is the part of vLLM that speaks with whatever is outside.",
        ),
        wrong=(
            (_JOBS | {"computes attention with the KV": "LMCache"}, "Who has a model"),
            (
                _JOBS | {"throws a block out of the pool on the device": "LMCache"},
                "whoever owns it",
            ),
            (
                _JOBS | {"cuts a prompt into chunks and makes the names of their files": "engine"},
                "chunks of 128",
            ),
            (
                _JOBS
                | {
                    "cuts a prompt into chunks and makes the names of their files": (
                        "Mooncake Store"
                    )
                },
                "Does the Store know of tokens",
            ),
            (
                _JOBS | {"copies so many bytes from one address to another": "Mooncake Store"},
                "does not carry",
            ),
            (
                _JOBS | {"knows in which client's memory an object lies": "Transfer Engine"},
                "who has a master",
            ),
            (
                _JOBS | {"tells vLLM's scheduler how many tokens could be loaded": "LMCache"},
                "inside of vLLM",
            ),
            (_JOBS | {"sends a request to one of two replicas": "engine"}, "before any engine"),
            (_JOBS | {"sends a request to one of two replicas": "nginx"}, "choose one of"),
            ("engine", "keep the keys"),
        ),
    ),
    Exercise(
        id="06.2",
        title="Whole pieces",
        minutes=8,
        difficulty=1,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_pieces,
        hints=(
            "After an answer of 20 tokens there is KV for 19 of them.",
            "How many full pieces of 32 are in 725? Of 16?",
            "After the reset the prompt has 760 tokens, and its KV was computed to the end before.",
        ),
        wrong=(
            (dict(zip(_PIECES, (726, 720, 640), strict=True)), "a piece that is not full"),
            (dict(zip(_PIECES, (704, 704, 640), strict=True)), "the question alone leaves"),
            (dict(zip(_PIECES, (704, 720, 768), strict=True)), "more than the prompt"),
            (dict(zip(_PIECES, (736, 720, 640), strict=True)), "for how many tokens is there KV"),
            (dict(zip(_PIECES, (704, 720, 512), strict=True)), "more than that is there"),
            (dict(zip(_PIECES, (704, 720, 725), strict=True)), "pieces have 128"),
            (dict(zip(_PIECES, (704, 736, 640), strict=True)), "for how many tokens is there KV"),
            (704, "keep the keys"),
        ),
        right=(dict(zip(_PIECES, (704.0, np.int64(720), 640), strict=True)),),
    ),
    Exercise(
        id="06.3",
        title="What a missing chunk costs",
        minutes=12,
        difficulty=2,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_gaps,
        hints=(
            "Only what reaches from the first token on without a gap can be used.",
            "vLLM asks its own pool first; LMCache is asked for what comes after that.",
            "A chunk in LMCache's host memory needs no file.",
        ),
        wrong=(
            (dict(zip(_GAPS, (1792, 1408, 800, 2048), strict=True)), "behind the gap"),
            (dict(zip(_GAPS, (1408, 1408, 800, 2048), strict=True)), "comes first"),
            (dict(zip(_GAPS, (768, 1408, 800, 2048), strict=True)), "counted from 0"),
            (dict(zip(_GAPS, (640, 1408, 640, 2048), strict=True)), "vLLM's own pool"),
            (dict(zip(_GAPS, (640, 1408, 1440, 2048), strict=True)), "LMCache ends before it"),
            (dict(zip(_GAPS, (640, 800, 800, 2048), strict=True)), "go on where the pool ends"),
            (dict(zip(_GAPS, (640, 2208, 800, 2048), strict=True)), "16 full chunks"),
            (dict(zip(_GAPS, (640, 1408, 800, 1536), strict=True)), "are the files asked"),
            (dict(zip(_GAPS, (640, 1408, 800, 2100), strict=True)), "16 full chunks"),
            (dict(zip(_GAPS, (640, 1920, 800, 2048), strict=True)), "behind the gap"),
            (640, "keep the keys"),
        ),
        right=(dict(zip(_GAPS, (640.0, np.int64(1408), 800, 2048), strict=True)),),
    ),
    Exercise(
        id="06.4",
        title="Who answered?",
        minutes=10,
        difficulty=2,
        kind="explain",
        roles=_EVERYBODY,
        check=_check_records,
        hints=(
            "Begin with the first three rows: they add up to the prompt, and say what vLLM took.",
            "LMCache looks up for each request, whoever answers in the end.",
        ),
        wrong=(
            (_RECORDS | {"C": "LMCache, host memory"}, "by vLLM's own account"),
            (_RECORDS | {"E": "LMCache, files"}, "How many tokens did vLLM get"),
            (_RECORDS | {"A": "LMCache, host memory"}, "which of LMCache's tiers"),
            (_RECORDS | {"F": "LMCache, files"}, "which of LMCache's tiers"),
            (_RECORDS | {"D": "nobody"}, "401 tokens were not computed"),
            (_RECORDS | {"D": "Mooncake Store"}, "no object was asked for"),
            (_RECORDS | {"B": "vLLM's own pool"}, "that would be local_cache_hit"),
            (dict.fromkeys(_RECORDS, "nobody"), "was everything computed"),
            (_RECORDS | {"B": "the cloud"}, "choose one of"),
            ("nobody", "keep the keys"),
        ),
    ),
    Exercise(
        id="06.5",
        title="Write who_answered",
        minutes=15,
        difficulty=2,
        kind="build",
        roles=_STORAGE,
        check=_check_answered,
        hints=(
            "A helper that gives the sum of all counters of a name, whatever its labels, 0 if "
            "there is none, makes the rest four lines.",
            "A name with labels goes on with a brace; another name that begins alike does not.",
            "In vain: LMCache's hits less what vLLM says came from outside.",
        ),
        wrong=(
            *((partial(_answered, flaw=flaw), reason[:24]) for flaw, reason in _FLAWS.items()),
            (partial(_answered, flaw="begins alike"), "that is another counter"),
            (lambda before, after: None, "is a `return` missing"),
            (lambda before, after: dict.fromkeys(_PARTS, 0), "request 1 of the recorded"),
            (lambda before, after: {"computed": 401}, "keep the keys"),
            (
                lambda before, after: {
                    "computed": after[_HIT + '{cache_salt=""}'],
                    "own pool": 0,
                    "brought": 0,
                    "offered in vain": 0,
                },
                "KeyError",
            ),
            ({"computed": 401}, "pass the function itself"),
        ),
        right=(
            lambda before, after: {
                part: np.float64(value) for part, value in _answered(before, after).items()
            },
        ),
    ),
    Exercise(
        id="06.6",
        title="Offered and taken",
        minutes=8,
        difficulty=2,
        kind="measure",
        roles=("cache and storage", "platform/SRE", "solutions"),
        check=_check_taken,
        hints=(
            "The cell shows counters since the start; the last line has the sum of all four.",
            "What did vLLM compute? And what would it have computed besides, had nobody brought "
            "it?",
        ),
        wrong=(
            ({"offered": 2560, "taken": 640, "computed without LMCache": 1546}, "were looked up"),
            ({"offered": 640, "taken": 640, "computed without LMCache": 1546}, "count as hits"),
            ({"offered": 1920, "taken": 1920, "computed without LMCache": 1546}, "is not taken"),
            ({"offered": 1920, "taken": 1440, "computed without LMCache": 1546}, "own pool"),
            ({"offered": 1920, "taken": 640, "computed without LMCache": 906}, "with LMCache"),
            ({"offered": 1920, "taken": 640, "computed without LMCache": 2826}, "own pool gave"),
            ({"offered": 1920, "taken": 640, "computed without LMCache": 2986}, "still be there"),
            ({"offered": 384, "taken": 640, "computed without LMCache": 1546}, "all four"),
            (640, "keep the keys"),
        ),
        right=({"offered": 1920.0, "taken": np.int64(640), "computed without LMCache": 1546},),
    ),
    Exercise(
        id="06.7",
        title="Four that do not work, and one that does",
        minutes=15,
        difficulty=3,
        kind="explain",
        roles=("cache and storage", "platform/SRE", "solutions"),
        check=_check_broken,
        hints=(
            "Follow the request: how many tokens were looked up, how many found, how many loaded, "
            "how many did vLLM take?",
            "Look at what was looked up: 384 of 401 tokens are 3 chunks of 128. 256 are what?",
            "Then look at vLLM's own pool, the second time: in which set-ups should it have had "
            "the prompt, and did not?",
        ),
        wrong=(
            (_BROKEN | {"A": "the files were deleted"}, "three older files"),
            (_BROKEN | {"A": "the files are there, and empty"}, "would be found"),
            (_BROKEN | {"B": "LMCache's server has ended"}, "who answers the look-ups"),
            (_BROKEN | {"B": "the files were deleted"}, "were loaded from files"),
            (_BROKEN | {"B": "each request has a cache_salt of its own"}, "own pool would find"),
            (_BROKEN | {"A": "nothing is broken"}, "and the first"),
            (_BROKEN | {"C": "the files were deleted"}, "is no better"),
            (_BROKEN | {"C": "the chunk size was changed"}, "as before"),
            (_BROKEN | {"D": "the files were deleted"}, "nobody finds them"),
            (_BROKEN | {"D": "the chunk size was changed"}, "as before"),
            (_BROKEN | {"D": "nothing is broken"}, "is nothing"),
            (_BROKEN | {"E": "the Store's master was restarted"}, "knows no objects"),
            (_BROKEN | {"E": "nothing is broken"}, "became of the twelve"),
            (_BROKEN | {"E": "the files are there, and empty"}, "no LMCache in E"),
            (_BROKEN | {"C": "the client that held the objects is dead"}, "only E has a Store"),
            (dict.fromkeys(_BROKEN, "nothing is broken"), "and the first"),
            (_BROKEN | {"E": "cosmic rays"}, "choose one of"),
            (_BROKEN["A"], "keep the keys"),
        ),
    ),
    Exercise(
        id="06.8",
        title="Break it: missing, or there and wrong",
        minutes=10,
        difficulty=3,
        kind="break",
        roles=_STORAGE,
        check=_check_heals,
        hints=(
            "After the first recovery vLLM has computed what was missing. Where does that go?",
            "And what becomes of a file whose name is there already? Look into the folder.",
        ),
        wrong=(
            (dict(zip(_HEALS, (1920, 2048, 384, 384), strict=True)), "behind the gap"),
            (dict(zip(_HEALS, (512, 2048, 384, 384), strict=True)), "counted from 0"),
            (dict(zip(_HEALS, (384, 384, 384, 384), strict=True)), "who got it"),
            (dict(zip(_HEALS, (384, 2048, 2048, 2048), strict=True)), "524,288 bytes"),
            (dict(zip(_HEALS, (384, 2048, 384, 2048), strict=True)), "one of that name"),
            (dict(zip(_HEALS, (0, 2048, 384, 384), strict=True)), "before number 3"),
            (384, "keep the keys"),
        ),
        right=(dict(zip(_HEALS, (384.0, np.int64(2048), 384, 384), strict=True)),),
        after=("06.3",),
    ),
)
