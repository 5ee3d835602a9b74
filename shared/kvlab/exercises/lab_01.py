"""Lab 01, scheduling: who runs in this step, and with how many tokens.

Steps are counted from 1, as in the pictures; `minikv.trace.Step.index` counts from 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from kvlab.check import Exercise, Wrong, number
from minikv.blocks import Block, KVCacheManager
from minikv.trace import Arrival, Step, dry_run


def _keyed(answer: Any, keys: Sequence[Any]) -> dict[Any, int | float]:
    """The answer's numbers by key, if it is a dict with just these keys."""
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"keep the keys: {', '.join(repr(key) for key in keys)}")
    return {key: number(answer[key], f"the number for {key!r}") for key in keys}


def _shares(given: Any, what: str) -> dict[str, int | float]:
    """Tokens by request as plain numbers; requests with 0 are left out."""
    if given is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(given, Mapping):
        raise Wrong(f"{what} should be a dict, request to tokens, and is a {type(given).__name__}")
    plain = {name: number(tokens, f"{what} for {name!r}") for name, tokens in given.items()}
    return {name: tokens for name, tokens in plain.items() if tokens}


# 01.1 -----------------------------------------------------------------------

_FIRST = (
    Arrival(id="a", prompt=150, output=2),
    Arrival(id="b", prompt=30, output=3, step=1),
    Arrival(id="c", prompt=40, output=1, step=1),
)
_FIRST_BUDGET = 64


def _check_first_table(answer: Any) -> str:
    if not isinstance(answer, (list, tuple)) or not answer:
        raise Wrong("the answer is a list with one dict for each step")
    mine = [_shares(step, f"step {i + 1}") for i, step in enumerate(answer)]
    right = [step.tokens for step in dry_run(_FIRST, max_num_batched_tokens=_FIRST_BUDGET)]
    waiting_for = {"a": 150, "b": 30, "c": 40}
    for i, (got, wanted) in enumerate(zip(mine, right, strict=False)):
        if got != wanted:
            raise Wrong(f"step {i + 1} is not right. {_why_first(got, wanted, waiting_for)}")
        for name, tokens in wanted.items():
            waiting_for[name] -= tokens
    if len(mine) < len(right):
        raise Wrong(
            f"{len(mine)} steps are right so far, but then somebody still lacks tokens: who has "
            "not generated all of its output?"
        )
    if len(mine) > len(right):
        raise Wrong(
            f"the first {len(right)} steps are right, and then everybody is done. The last token "
            "that a request generates is never an input"
        )
    return (
        "Running requests first, in order; then waiting ones, with what is left. The one at the "
        "end of the budget is cut, and goes on in the next step."
    )


def _why_first(got: dict[str, Any], wanted: dict[str, int], missing: dict[str, int]) -> str:
    unknown = set(got) - set(missing)
    if unknown:
        return f"There is no request {sorted(unknown)[0]!r}."
    if sum(got.values()) > _FIRST_BUDGET:
        return f"That is more than {_FIRST_BUDGET} tokens in one step."
    early = [name for name in got if name not in wanted]
    if early and missing[early[0]] > 0:
        return f"Is anything left of the budget when the turn comes to {early[0]!r}?"
    if early:
        return f"Has {early[0]!r} not got all it asked for by then?"
    for name, tokens in wanted.items():
        if name not in got:
            return (
                f"{name!r} gets something too: what is left of the budget when its turn comes? A "
                "prompt that does not fit is cut, not put off."
                if missing[name] > 1
                else f"{name!r} is running and has a token to compute."
            )
        if got[name] != tokens:
            if missing[name] <= 0 or tokens == 1:
                return f"A decode computes one token: look at {name!r}."
            if got[name] > missing[name]:
                return f"{name!r} has fewer tokens left to compute than that."
            return f"Look at {name!r}: the smaller of what it lacks and of what is left."
    return "Count again."


# 01.2 and 01.3 --------------------------------------------------------------

_LONG, _SHORT, _BUDGET, _CAP = 1000, 20, 128, 64


def _case_1(output: int, threshold: int) -> dict[str, int]:
    """The step in which each request has its first token."""
    steps = dry_run(
        [
            Arrival(id="long", prompt=_LONG, output=1),
            Arrival(id="short", prompt=_SHORT, output=output),
        ],
        max_num_batched_tokens=_BUDGET,
        long_prefill_token_threshold=threshold,
    )
    return {
        name: max(step.index + 1 for step in steps if name in step.prefill)
        for name in ("long", "short")
    }


def _check_behind(answer: Any) -> str:
    got = _keyed(answer, ("long", "short"))
    right = _case_1(1, 0)
    if got == right:
        return (
            "7 x 128 = 896, then 104 and 20 together. The short prompt, a sixth of one step's "
            "budget, waited for seven steps: chunked prefill alone does not let it pass."
        )
    reasons = []
    if got["short"] == 1:
        reasons.append(
            "short: what is left of the budget of step 1 when the long prompt, first in the "
            "queue, has got its part?"
        )
    elif got["short"] == right["long"] + 1:
        reasons.append("short: the last part of the long prompt does not fill its step")
    elif got["short"] == 2:
        reasons.append(
            "short: being cut does not send the long prompt back to the queue. It runs now, and "
            "running requests come first in step 2 as well"
        )
    elif got["short"] != right["short"]:
        reasons.append("short: in which step is something left of the budget?")
    if got["long"] == right["long"] - 1:
        reasons.append(f"long: {right['long'] - 1} full steps are fewer than {_LONG} tokens")
    elif got["long"] == right["long"] + 1:
        reasons.append(
            "long: the step that computes the end of a prompt samples the first token as well"
        )
    elif got["long"] != right["long"]:
        reasons.append(f"long: how many steps of {_BUDGET} tokens does its prompt take?")
    raise Wrong("; ".join(reasons))


def _check_capped(answer: Any) -> str:
    keys = (1, 4, 16)
    got = _keyed(answer, keys)
    right = {output: _case_1(output, _CAP)["long"] for output in keys}
    if got == right:
        return (
            "With the cap the short prompt has its first token in step 1. What the long one pays "
            "depends on how long it has company: the cap is lifted once it is alone."
        )
    if all(got[key] == 16 for key in keys):
        raise Wrong(
            f"{_LONG} / {_CAP} in each case: the cap protects others. Whom does it protect when "
            "the short request has ended?"
        )
    if all(got[key] == 8 for key in keys):
        raise Wrong("that is without the threshold: the long prompt has company in step 1")
    if len(set(got.values())) == 1:
        raise Wrong("the same for all three: how many steps does the short request stay?")
    if got == {output: _lifted_after(output - 1) for output in keys}:
        raise Wrong(
            "one step too early: the prefill step of the short request yields its first token, "
            "and it is there in that step"
        )
    if got == {output: _lifted_after(output + 1) for output in keys}:
        raise Wrong(
            "one step too late: the step that computes the short prompt already yields its first "
            "token. How many steps does it take part in?"
        )
    if all(got[key] == right[key] - 1 for key in keys):
        raise Wrong("count steps from 1")
    bad = [key for key in keys if got[key] != right[key]]
    raise Wrong(
        f"short generates {bad[0]}: {_CAP} tokens a step while both are there, {_BUDGET} a step "
        "after that. How many steps are both there?"
    )


def _lifted_after(capped: int) -> int:
    rest = _LONG - min(_LONG, capped * _CAP)
    return min(capped, -(-_LONG // _CAP)) + -(-rest // _BUDGET)


# 01.4 -----------------------------------------------------------------------

Missing = dict[str, int]
OneStep = Callable[[Missing, Missing, int, int, int], dict[str, int]]


def _one_step(
    running: Missing, waiting: Missing, budget: int, threshold: int, max_num_seqs: int
) -> dict[str, int]:
    """The right one; what a learner writes."""
    cap = threshold if len(running) + len(waiting) > 1 else 0
    given = {}
    admitted = dict(list(waiting.items())[: max(0, max_num_seqs - len(running))])
    for name, missing in (running | admitted).items():
        given[name] = min(missing, cap or missing, budget)
        budget -= given[name]
    return {name: tokens for name, tokens in given.items() if tokens}


def _flawed(
    flaw: str, running: Missing, waiting: Missing, budget: int, threshold: int, max_num_seqs: int
) -> dict[str, int]:
    """The step with one plausible mistake in it."""
    company = len(running) + len(waiting) > 1
    if flaw == "only the running are company":
        company = len(running) > 1
    if flaw == "one that runs is alone":
        company = len(running) != 1
    if flaw == "the seated are company":
        company = len(running) + min(len(waiting), max(0, max_num_seqs - len(running))) > 1
    cap = threshold if (company or flaw == "capped when alone") and flaw != "no cap" else 0
    room = max(0, max_num_seqs - len(running))
    if flaw == "seats for the waiting":
        room = max_num_seqs
    if flaw == "no seats":
        room = len(waiting)
    if flaw == "nobody joins" and running:
        room = 0
    entering = dict(list(waiting.items())[:room])
    given = {}
    order = entering | running if flaw == "waiting first" else running | entering
    if flaw == "shortest running first":
        order = dict(sorted(running.items(), key=lambda item: item[1])) | entering
    if flaw == "decodes first":
        order = dict(sorted(order.items(), key=lambda item: item[1] != 1))
    if flaw in ("shortest first", "longest first"):
        down = flaw == "longest first"
        order = dict(sorted(order.items(), key=lambda item: item[1], reverse=down))
    for name, missing in order.items():
        tokens = min(missing, cap or missing)
        uncapped = {"newcomers uncapped": entering, "running uncapped": running}.get(flaw, {})
        if name in uncapped:
            tokens = missing
        if flaw == "zero is a cap" and not threshold:
            tokens = 0
        if flaw == "zero is a cap in company" and company and not threshold:
            tokens = 0
        if flaw == "not cut" and name in entering and tokens > budget:
            break
        if flaw == "skipped" and name in entering and tokens > budget:
            continue
        if flaw == "nobody is cut" and tokens > budget:
            continue
        if flaw == "put off whole" and name in entering and missing > budget:
            break
        tokens = min(tokens, max(budget, 0))
        if flaw == "a decode in any case" and name in running and missing == 1:
            tokens = 1
        given[name] = tokens
        if flaw != "a budget each":
            budget -= tokens
    return given


_STEP_MISTAKES: tuple[tuple[OneStep, str], ...] = tuple(
    (partial(_flawed, flaw), reason)
    for flaw, reason in (
        ("waiting first", "running requests come first; the waiting ones get what they leave"),
        ("no cap", "where is the threshold? It caps what one request gets in a step"),
        ("capped when alone", "a request that is alone, nobody running or waiting, has no cap"),
        ("zero is a cap", "a threshold of 0 means that there is none"),
        ("zero is a cap in company", "a threshold of 0 means that there is none"),
        ("running uncapped", "the threshold holds for a running request, too"),
        ("newcomers uncapped", "the threshold holds for a request that enters in this step, too"),
        ("not cut", "a waiting prompt that does not fit what is left is cut, not put off"),
        ("skipped", "a waiting prompt that does not fit what is left is cut, not put off"),
        ("nobody is cut", "who does not fit what is left of the budget is cut, not put off"),
        ("put off whole", "a waiting prompt that does not fit what is left is cut, not put off"),
        ("shortest running first", "the order is that of the dicts, not of what somebody lacks"),
        ("shortest first", "the order is that of the dicts, not of what somebody lacks"),
        ("longest first", "the order is that of the dicts, not of what somebody lacks"),
        ("no seats", "at most max_num_seqs requests may run, those that enter included"),
        ("seats for the waiting", "those that run already count for max_num_seqs, too"),
        ("a budget each", "the budget is one for the whole step, not one for each request"),
        ("decodes first", "the order is that of the dicts: a decode does not pass a prompt"),
        (
            "a decode in any case",
            "where the budget is used up, whoever comes later gets nothing, a decode too",
        ),
        ("nobody joins", "waiting requests may enter while others run: that is the point of it"),
        *(
            (flaw, "a request that waits is company as well: the cap holds for its sake")
            for flaw in (
                "only the running are company",
                "one that runs is alone",
                "the seated are company",
            )
        ),
    )
)


def _states(
    arrivals: Sequence[Arrival], steps: Sequence[Step]
) -> Iterator[tuple[Missing, Missing, dict[str, int]]]:
    """For each step who ran and who waited with how many tokens missing, and what they got."""
    order = sorted(arrivals, key=lambda arrival: arrival.step)
    tokens = {a.id: a.prompt for a in arrivals if isinstance(a.prompt, int)}
    computed = dict.fromkeys(tokens, 0)
    to_come = {a.id: a.output for a in arrivals}
    running: list[str] = []
    for step in steps:
        waiting = {
            a.id: tokens[a.id]
            for a in order
            if a.step <= step.index and a.id not in running and to_come[a.id]
        }
        yield {name: tokens[name] - computed[name] for name in running}, waiting, step.tokens
        for name, count in step.tokens.items():
            if name not in running:
                running.append(name)
            computed[name] += count
            if computed[name] == tokens[name]:
                tokens[name] += 1
                to_come[name] -= 1
                if not to_come[name]:
                    running.remove(name)


# Runs in which running requests lack more than the budget, so that their order shows: prompt and
# output of each, budget, threshold.
_CROWDED: tuple[tuple[tuple[tuple[int, int], ...], int, int], ...] = (
    (((500, 2), (500, 2), (40, 2)), 64, 25),
    (((300, 3), (90, 3), (200, 3), (30, 3)), 100, 30),
    (((60, 3), (200, 2), (50, 3), (25, 4)), 64, 20),
)
_RANDOM_RUNS = 40

# States that do not come about by themselves: prompts that run stand before decodes, and leave
# them nothing. Who runs, who waits, budget, threshold, seats.
_MADE_UP: tuple[tuple[Missing, Missing, int, int, int], ...] = (
    ({"a": 300, "b": 1}, {}, 64, 0, 8),
    ({"a": 300, "b": 1, "c": 90, "d": 1}, {"e": 20}, 100, 50, 8),
    ({"a": 300, "b": 200, "c": 1}, {"d": 1}, 64, 32, 8),
)


def _step_cases() -> list[tuple[Missing, Missing, int, int, int, dict[str, int]]]:
    """States that minikv's scheduler came through, and what it did: always the same ones."""
    rng = random.Random(1)
    cases = []
    for requests, budget, threshold in _CROWDED:
        arrivals = [
            Arrival(id=name, prompt=prompt, output=output)
            for name, (prompt, output) in zip("abcd", requests, strict=False)
        ]
        steps = dry_run(
            arrivals, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold
        )
        cases += [
            (running, waiting, budget, threshold, 128, got)
            for running, waiting, got in _states(arrivals, steps)
        ]
    for _ in range(_RANDOM_RUNS):
        budget = rng.choice((16, 64, 100, 256))
        seats = rng.choice((1, 2, 3, 8))
        threshold = rng.choice((0, 0, budget // 4, budget // 2))
        arrivals = [
            Arrival(
                id=name,
                prompt=rng.choice((5, 20, 90, 400)),
                output=rng.randint(1, 6),
                step=rng.randint(0, 8),
            )
            for name in "abcdef"[: rng.randint(1, 6)]
        ]
        steps = dry_run(
            arrivals,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            long_prefill_token_threshold=threshold,
        )
        cases += [
            (running, waiting, budget, threshold, seats, got)
            for running, waiting, got in _states(arrivals, steps)
        ]
    cases += [(*state, _one_step(*state)) for state in _MADE_UP]
    return cases


def _check_one_step(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function one_step and pass the function itself")
    cases = _step_cases()
    results = [
        _shares(answer(dict(running), dict(waiting), *settings), "the result")
        for running, waiting, *settings, _ in cases
    ]
    wrong = [(case, got) for case, got in zip(cases, results, strict=True) if got != case[-1]]
    if not wrong:
        return (
            f"Equal to minikv's scheduler in {len(cases) - len(_MADE_UP)} steps of {_RANDOM_RUNS} "
            f"random runs and {len(_CROWDED)} crowded ones, and so to vLLM's: while memory lasts, "
            "this is the whole of it."
        )
    (running, waiting, budget, threshold, seats, wanted), got = wrong[0]
    first = next(
        (name for name in running | waiting if got.get(name, 0) != wanted.get(name, 0)), None
    )
    reason = "In which order are they served, and what limits each of them?"
    if first is not None:
        reason += f" Look first at {first!r}."
    for formula, its_reason in _STEP_MISTAKES:
        formula_gives = [
            _shares(formula(dict(r), dict(w), *settings), "") for r, w, *settings, _ in cases
        ]
        if results == formula_gives:
            reason = its_reason[0].upper() + its_reason[1:]
            break
    else:
        if sum(got.values()) > budget:
            reason = "That is more than the budget of the step."
    raise Wrong(
        f"running {running}, waiting {waiting}, budget {budget}, threshold {threshold}, "
        f"max_num_seqs {seats}: {got} is not right. {reason}"
    )


# 01.5 -----------------------------------------------------------------------

_STEP_MS, _SECONDS, _PROMPT_BUDGET = 50, 10, 64

Choose = Callable[[list[str], dict[str, int], int], dict[str, int]]


def _prefill_first(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    given = {}
    for name, missing in prompts.items():
        given[name] = min(missing, budget)
        budget -= given[name]
    return {n: t for n, t in given.items() if t} or dict.fromkeys(decoding, 1)


def _mixed(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _one_step(dict.fromkeys(decoding, 1) | prompts, {}, budget, 0, 10**6)


def _mixed_prompts_first(
    decoding: list[str], prompts: dict[str, int], budget: int
) -> dict[str, int]:
    return _one_step(prompts | dict.fromkeys(decoding, 1), {}, budget, 0, 10**6)


def _decode_first(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return dict.fromkeys(decoding, 1)


def _one_prompt(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _prefill_first(decoding, dict(list(prompts.items())[:1]), budget)


def _whole_prompts(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    given = {}
    for name, missing in prompts.items():
        if missing > budget:
            break
        given[name] = missing
        budget -= missing
    return given or dict.fromkeys(decoding, 1)


def _whole_prompts_or_nothing(
    decoding: list[str], prompts: dict[str, int], budget: int
) -> dict[str, int]:
    return _whole_prompts([] if prompts else decoding, prompts, budget)


def _prompts_that_fit(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    given = {}
    for name, missing in prompts.items():
        if missing <= budget:
            given[name] = missing
            budget -= missing
    return given or dict.fromkeys(decoding, 1)


def _prompts_that_fit_or_nothing(
    decoding: list[str], prompts: dict[str, int], budget: int
) -> dict[str, int]:
    return _prompts_that_fit([] if prompts else decoding, prompts, budget)


def _last_first(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _prefill_first(decoding, dict(reversed(prompts.items())), budget)


def _largest_first(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    order = dict(sorted(prompts.items(), key=lambda item: item[1], reverse=True))
    return _prefill_first(decoding, order, budget)


def _smallest_first(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _prefill_first(decoding, dict(sorted(prompts.items(), key=lambda item: item[1])), budget)


def _one_decode(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _prefill_first(decoding[:1], prompts, budget)


def _never_decodes(decoding: list[str], prompts: dict[str, int], budget: int) -> dict[str, int]:
    return _prefill_first([], prompts, budget)


_CHOOSE_MISTAKES: tuple[tuple[Choose, str], ...] = (
    (_mixed, "that is a mixed batch. Prefill-first puts either prompts or decodes into a step"),
    (
        _mixed_prompts_first,
        "that still mixes: in a step with prompts no decode takes part, even if budget is left",
    ),
    (_decode_first, "that is decode first: the prompts never get a step"),
    (_one_prompt, "all prompts that fit the budget share a step, not the first alone"),
    *(
        (rule, "a prompt that does not fit what is left is cut; a larger one would wait for ever")
        for rule in (
            _whole_prompts,
            _whole_prompts_or_nothing,
            _prompts_that_fit,
            _prompts_that_fit_or_nothing,
        )
    ),
    *(
        (rule, "prompts share the budget in the order in which they came")
        for rule in (_last_first, _largest_first, _smallest_first)
    ),
    (_one_decode, "each decoding request gets its token, not the first alone"),
    (_never_decodes, "when no prompt is there, the step belongs to the decodes"),
)


# decoding, prompts, budget; random ones follow in `_choices`
_CHOICES: tuple[tuple[list[str], dict[str, int], int], ...] = (
    (["d"], {"p": 40}, 64),
    (["d", "e"], {}, 64),
    (["d", "e"], {"p": 30, "q": 20}, 64),
    (["d", "e"], {"p": 40, "q": 50}, 64),
    (["d", "e"], {"p": 100, "q": 10}, 64),
    ([], {"p": 20, "q": 90, "r": 5}, 64),
)


def _choices() -> list[tuple[list[str], dict[str, int], int]]:
    rng = random.Random(5)
    cases = list(_CHOICES)
    for _ in range(60):
        decoding = rng.sample("cdefg", rng.randint(1, 4))
        names = rng.sample("pqrst", rng.choice((0, 0, 1, 2, 2, 3, 4)))  # not in order of the names
        cases.append((decoding, {n: rng.randint(1, 100) for n in names}, rng.choice((32, 64, 128))))
    return cases


def _ten_seconds(choose: Choose, every_ms: int | None) -> int:
    """Tokens that a decoding request gets beside prompts as long as the budget."""
    prompts: dict[str, int] = {}
    decoded = arrived = 0
    for step in range(_SECONDS * 1000 // _STEP_MS):
        while every_ms is not None and arrived * every_ms <= step * _STEP_MS:
            prompts[f"p{arrived}"] = _PROMPT_BUDGET
            arrived += 1
        given = choose(["d"], prompts, _PROMPT_BUDGET)
        decoded += given.get("d", 0)
        left = {name: missing - given.get(name, 0) for name, missing in prompts.items()}
        prompts = {name: missing for name, missing in left.items() if missing}
    return decoded


def _check_prefill_first(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function prefill_first and pass the function itself")
    cases = _choices()
    results = []
    for decoding, prompts, budget in cases:
        got = _shares(answer(list(decoding), dict(prompts), budget), "the result")
        results.append(got)
        lacks = dict.fromkeys(decoding, 1) | prompts
        case = f"decoding {decoding}, prompts {prompts}, budget {budget}"
        for name, tokens in got.items():
            if name not in lacks:
                raise Wrong(f"{case}: there is no request {name!r} in that step")
            if not 0 < tokens <= lacks[name]:
                raise Wrong(f"{case}: {name!r} lacks {lacks[name]} tokens and got {tokens}")
        if sum(got.values()) > budget:
            raise Wrong(f"{case}: the step got {sum(got.values())} tokens; its budget is {budget}")
    right = [_prefill_first(*case) for case in cases]
    if results == right:
        idle, some, many = (_ten_seconds(_prefill_first, every) for every in (None, 100, 40))
        mixed = _ten_seconds(_mixed, 40)
        return (
            f"In 10 seconds the decoding request gets {idle} tokens while nothing comes, {some} "
            f"with a prompt every 100 ms, and {many} with one every 40 ms: as long as a prompt "
            f"waits it stands still. Mixed batches give it {mixed} in all three."
        )
    reason = "while any prompt has tokens left, what does the step consist of? And otherwise?"
    for formula, its_reason in _CHOOSE_MISTAKES:
        if results == [_shares(formula(*case), "") for case in cases]:
            reason = its_reason
            break
    (decoding, prompts, budget), got = next(
        (case, got) for case, got, r in zip(cases, results, right, strict=True) if got != r
    )
    raise Wrong(
        f"decoding {decoding}, prompts {prompts}, budget {budget}: {got} is not right. "
        f"{reason[0].upper()}{reason[1:]}"
    )


# 01.6 -----------------------------------------------------------------------


def _check_preempted(answer: Any) -> str:
    keys = ("victim", "step", "token-forwards")
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"keep the keys: {', '.join(repr(key) for key in keys)}")
    step = number(answer["step"], "the step")
    forwards = number(answer["token-forwards"], "the number of token-forwards")
    if answer["victim"] not in ("x", "y"):
        raise Wrong('the victim is "x" or "y"')
    reasons = []
    if answer["victim"] == "x":
        reasons.append(
            "victim: under fcfs the request admitted last gives way, whoever is in need of a block"
        )
    if step == 2:
        reasons.append("step: the last of the four blocks has room for 64 - 60 more tokens")
    elif step in (5, 7):
        reasons.append(
            f"step: token 61 is sampled in step 1 and computed, so written, in step 2. In which "
            f"step is token 65 computed? Not in step {step}"
        )
    elif step != 6:
        reasons.append("step: in which step does a request compute its token 65?")
    if forwards == 178:
        reasons.append(
            "token-forwards: that is without recomputation. What does the victim find of its KV "
            "when it comes back?"
        )
    elif forwards == 238:
        reasons.append("token-forwards: more than the prompt is lost. What had it decoded?")
    elif forwards in (240, 241, 243, 244):
        reasons.append(
            "token-forwards: close. How many tokens of the victim had been computed at the end of "
            "the step before?"
        )
    elif forwards != 242:
        reasons.append(
            "token-forwards: prompt + output - 1 for each of them, and once more what the victim "
            "lost"
        )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        "2 x 89, and 64 for the second time: y keeps its 65 tokens, one of them not yet computed, "
        "and loses the KV of the 64 others."
    )


# 01.7 -----------------------------------------------------------------------

_CASE_4_KEYS = ("blocks for one prompt", "B enters", "B is thrown out", "preemptions, careful")


def _check_short_sighted(answer: Any) -> str:
    got = _keyed(answer, _CASE_4_KEYS)
    reasons = []
    if got["blocks for one prompt"] != 75:
        reasons.append("blocks for one prompt: 1,200 tokens in blocks of 16")
    if got["B enters"] == 1:
        reasons.append("B enters: A, first in the queue, takes the whole budget of step 1")
    elif got["B enters"] == 6:
        reasons.append("B enters: A's last part does not fill its step")
    elif got["B enters"] != 5:
        reasons.append("B enters: in which step does A leave something of the budget?")
    if got["B is thrown out"] == 6:
        reasons.append(
            "B is thrown out: count the blocks of step 6. A has 76, B those of 80 + 255 tokens"
        )
    elif got["B is thrown out"] == 8:
        reasons.append("B is thrown out: with its third part B would have 590 tokens, 37 blocks")
    elif got["B is thrown out"] != 7:
        reasons.append(
            "B is thrown out: from step 6 on A needs 76 blocks. In which step do B's tokens so "
            "far and its next part need more than the other 24?"
        )
    if got["preemptions, careful"] != 0:
        reasons.append(
            "preemptions, careful: B enters only when 75 blocks are free, so not before A has "
            "ended. Who is there to be thrown out?"
        )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        "Both prompts need 150 of 100 blocks. To let B in early wins nothing: B is thrown out, is "
        "next in the queue, its first part fits again, and so on until A ends."
    )


# 01.8 -----------------------------------------------------------------------


def _check_urgent(answer: Any) -> str:
    got = _keyed(answer, ("first token", "preemptions"))
    reasons = []
    if got["first token"] in (4, 5):
        reasons.append(
            "first token: both seats are taken when it comes, and what waits does not push out "
            "what runs, whatever its priority"
        )
    elif got["first token"] == 8:
        reasons.append("first token: x still runs in step 8, where its 8th token comes")
    elif got["first token"] in (13, 14):
        reasons.append("first token: one free seat is enough; who ends first?")
    elif got["first token"] != 9:
        reasons.append("first token: when is a seat free for the first time?")
    if got["preemptions"] != 0:
        reasons.append(
            "preemptions: one happens when a *running* request needs a block and none is free. "
            "Here there are plenty of blocks"
        )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        "Priority orders the queue and picks the victim. It takes no seat from anybody: an urgent "
        "request waits for the end of one that is not."
    )


# 01.9 -----------------------------------------------------------------------

_ITL_MS, _TTFT_MS = 50, 600
_CHATTERS = 8


def _milliseconds(tokens: int) -> float:
    return 20 + tokens / 10


def _objectives(budget: int) -> tuple[float, float]:
    """The longest step in which somebody decodes, and the long prompt's time to first token."""
    chat = [Arrival(id=f"chat{i}", prompt=16, output=100) for i in range(_CHATTERS)]
    steps = dry_run(
        [*chat, Arrival(id="long", prompt=3000, output=1, step=5)], max_num_batched_tokens=budget
    )
    times = {step.index: _milliseconds(sum(step.tokens.values())) for step in steps}
    done = max(step.index for step in steps if "long" in step.prefill)
    longest = max(times[step.index] for step in steps if step.decode)
    return longest, sum(times[i] for i in range(5, done + 1))


def _check_budget(answer: Any) -> str:
    budget = number(answer, "the budget")
    if not isinstance(budget, int) or budget < 1:
        raise Wrong("a budget is a whole number of tokens, at least 1")
    if budget > 100_000:
        raise Wrong("no step needs such a budget")
    longest, first = _objectives(budget)
    if longest > _ITL_MS:
        decodes = budget - _CHATTERS
        reason = (
            "the decodes are in the budget, too"
            if 1 <= decodes <= 300 and budget > 300
            else "a smaller budget makes shorter steps"
        )
        raise Wrong(
            f"with {budget:,} there is a step of {longest:g} ms in which eight requests wait for "
            f"their next token; {_ITL_MS} are allowed: {reason}"
        )
    if first > _TTFT_MS:
        raise Wrong(
            f"with {budget:,} the steps are short enough, but the long prompt has its first token "
            f"only after {first:g} ms; {_TTFT_MS} are allowed. Each step costs 20 ms, however "
            "small it is"
        )
    return (
        f"With {budget} the longest step takes {longest:g} ms, and the first token comes after "
        f"{first:g} ms. A larger budget worsens the one, a smaller one the other: between them "
        "lies what your objectives allow, and it may be nothing."
    )


# 01.10 ----------------------------------------------------------------------

_STORIES = (
    "nothing special",
    "KV pool too small",
    "few seats (max_num_seqs)",
    "small token budget",
    "shared prefix",
)
_RECORDS = {
    "A": "few seats (max_num_seqs)",
    "B": "nothing special",
    "C": "KV pool too small",
    "D": "small token budget",
}
_RECOMPUTED = "shows the recomputed tokens"


def _check_records(answer: Any) -> str:
    keys = (*_RECORDS, _RECOMPUTED)
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"keep the keys: {', '.join(repr(key) for key in keys)}")
    for name in _RECORDS:
        if answer[name] not in _STORIES:
            raise Wrong(f"{name}: choose one of {', '.join(repr(story) for story in _STORIES)}")
    for name, story in _RECORDS.items():
        if answer[name] == story:
            continue
        against = _AGAINST_HERE.get((name, answer[name])) or _AGAINST[answer[name]]
        raise Wrong(f"{name}: {against}")
    said = str(answer[_RECOMPUTED]).strip().lower()
    if "preemptions" in said:
        raise Wrong(
            f"{_RECOMPUTED}: it is not 0 in C, so it tells that somebody was thrown out, and how "
            "often. How many tokens were lost with it?"
        )
    if said in ("steps", "iteration_tokens_total_count") or "requests" in said:
        raise Wrong(
            f"{_RECOMPUTED}: {said!r} differs between C and B, but does it count tokens? Fewer "
            "requests at a time, more steps: that alone would change it"
        )
    if said not in ("none", "none of them"):
        raise Wrong(
            f"{_RECOMPUTED}: compare {said!r} in C with the same counter in B, where nothing was "
            'computed twice. (The answer is the name of a counter, or "none".)'
        )
    return (
        "C did the work of 8 prompts and some more, and its token counters say what B's say: they "
        "count what requests brought and got. The 2 preemptions say that work was lost, and no "
        "counter says how much."
    )


_AGAINST = {
    "nothing special": (
        "something held requests back: look at the highest number waiting, or the steps"
    ),
    "KV pool too small": (
        "24 blocks of 32 hold the prompts of how many requests? Compare the highest number running"
    ),
    "few seats (max_num_seqs)": (
        "seats limit how many *run* at the same time: compare the highest number running"
    ),
    "small token budget": (
        "a small budget cuts prompts: all can run in the end, and it takes more steps than "
        "needed by the output alone, but nobody is thrown out and no seat stays empty"
    ),
    "shared prefix": "then prompt tokens would have been found in the prefix cache",
}
_THROWN_OUT = "two preemptions: what throws a running request out? Seats and budgets do not"
_AGAINST_HERE = {
    ("C", "few seats (max_num_seqs)"): _THROWN_OUT,
    ("C", "small token budget"): _THROWN_OUT,
    ("C", "nothing special"): _THROWN_OUT,
    ("A", "small token budget"): (
        "a small budget cuts prompts, but who decodes needs one token: in the end more than two "
        "would run together"
    ),
}


# 01.11 ----------------------------------------------------------------------


class _Asking(KVCacheManager):
    """A manager whose admissions are decided by a learner's function."""

    may_admit: Callable[..., Any]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.prompt_blocks: dict[str, int] = {}

    def allocate(
        self, request_id: str, num_tokens: int, hits: Sequence[Block] = (), must_fit: int = 0
    ) -> bool:
        if must_fit:
            promised = sum(
                max(0, self.prompt_blocks[name] - len(table)) for name, table in self.tables.items()
            )
            said = type(self).may_admit(must_fit, self.pool.num_free, promised, self.block_size)
            if not isinstance(said, (bool, np.bool_)):
                raise Wrong(f"may_admit should return True or False; it returned {said!r:.40}")
            if not said:
                return False
        admitted = super().allocate(request_id, num_tokens, hits)
        if admitted and must_fit:
            self.prompt_blocks[request_id] = self._num_blocks(must_fit)
        return admitted


_ADMISSIONS: tuple[tuple[str, tuple[tuple[int, int], ...], dict[str, int]], ...] = (
    (
        "two 1,200-token prompts, 100 blocks, threshold 256",
        ((1200, 8), (1200, 8)),
        {"num_blocks": 101, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 256},
    ),
    (
        "two 1,200-token prompts, 100 blocks, budget 256",
        ((1200, 8), (1200, 8)),
        {"num_blocks": 101, "max_num_batched_tokens": 256},
    ),
    (
        "two 640-token prompts that fill 80 blocks together, threshold 128",
        ((640, 1), (640, 1)),
        {"num_blocks": 81, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 128},
    ),
    (
        "two 630-token prompts, 79 blocks, threshold 128",
        ((630, 1), (630, 1)),
        {"num_blocks": 80, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 128},
    ),
    (
        "three prompts of 500, 300 and 100 tokens, 26 blocks of 32, threshold 64",
        ((500, 8), (300, 8), (100, 8)),
        {
            "num_blocks": 27,
            "block_size": 32,
            "max_num_batched_tokens": 256,
            "long_prefill_token_threshold": 64,
        },
    ),
    (
        "three prompts of 200, 200 and 32 tokens, 40 blocks",
        ((200, 4), (200, 4), (32, 4)),
        {"num_blocks": 41, "max_num_batched_tokens": 512},
    ),
)


def _admission_run(
    may_admit: Callable[..., Any], requests: Sequence[tuple[int, int]], settings: dict[str, Any]
) -> list[Step] | None:
    """The steps under this rule of admission; None if it comes to no end."""
    manager = type("Asking", (_Asking,), {"may_admit": staticmethod(may_admit)})
    arrivals = [
        Arrival(id=chr(65 + i), prompt=prompt, output=output)
        for i, (prompt, output) in enumerate(requests)
    ]
    try:
        with patch("minikv.scheduler.KVCacheManager", manager):
            return dry_run(arrivals, max_steps=400, **settings)
    except RuntimeError as error:  # the learner's own as well
        if not str(error).startswith("not done after"):
            raise
        return None


def _keeps_promises(prompt_tokens: int, free_blocks: int, promised: int, block_size: int) -> bool:
    return -(-prompt_tokens // block_size) + promised <= free_blocks


def _check_may_admit(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function may_admit and pass the function itself")
    for name, requests, settings in _ADMISSIONS:
        steps = _admission_run(answer, requests, settings)
        best = _admission_run(_keeps_promises, requests, settings)
        assert best is not None
        if steps is None:
            raise Wrong(
                f"{name}: after 400 steps it is not done, because a request is never admitted. "
                "An empty pool has to take any prompt that fits it"
            )
        thrown = [victim for step in steps for victim in step.preempted]
        if thrown:
            raise Wrong(
                f"{name}: {thrown[0]} was thrown out in step "
                f"{next(step.index + 1 for step in steps if step.preempted)}. It was let in while "
                "blocks that are free now were needed by prompts half computed"
                if answer(1200, 84, 0, 16) and not answer(1200, 74, 0, 16)
                else f"{name}: {thrown[0]} was thrown out. What did those inside still have to "
                "take when it was let in?"
            )
        if len(steps) > len(best) or [s.tokens for s in steps] != [s.tokens for s in best]:
            raise Wrong(
                f"{name}: nobody is thrown out, but somebody waits who would have fitted "
                f"({len(steps)} steps, where {len(best)} are enough)"
                if len(steps) > len(best)
                else f"{name}: nobody is thrown out, but somebody waits who would have fitted"
            )
    return (
        "No prompt is thrown out because of another prompt, and none waits in vain. vLLM 0.32.0 "
        "asks only whether the prompt fits what is free now. Blocks that growing answers take are "
        "promised by neither: they can still throw a prompt out."
    )


# 01.12 ----------------------------------------------------------------------

_IMPOSSIBLE = ("B", 13)


def _check_impossible(answer: Any) -> str:
    if not isinstance(answer, Mapping) or set(answer) != {"table", "step"}:
        raise Wrong("keep the keys: 'table', 'step'")
    table = answer["table"]
    step = number(answer["step"], "the step")
    if table not in ("A", "B", "C"):
        raise Wrong('the table is "A", "B" or "C"')
    if table == "A":
        raise Wrong(
            "A can happen: find settings that give it. Which of them makes one request get more "
            "tokens in a later step than in an earlier one?"
        )
    if table == "C":
        raise Wrong(
            "C can happen: find a size of the pool that gives it. Who stands before d in the "
            "queue, and how many blocks does it need?"
        )
    if step == _IMPOSSIBLE[1]:
        return (
            "b came back with 60 tokens. It had 65: what it generated is kept, and has to be "
            "computed again together with the prompt before the next token can be sampled."
        )
    if step == 6:
        raise Wrong(
            "step 6 can happen: b needs a fifth block, none is free, and b itself was admitted last"
        )
    if 7 <= step < _IMPOSSIBLE[1]:
        raise Wrong(f"step {step} can happen: c would fit, but stands behind b, which does not")
    raise Wrong(
        "that table, but not that step. Keep book for each request: tokens it has, tokens that "
        "are computed"
    )


_EVERYBODY = ("backend", "kernel", "cache and storage", "platform/SRE", "solutions")
_OPERATORS = ("backend", "platform/SRE", "solutions")
_FIRST_RIGHT = [{"a": 64}, {"a": 64}, {"a": 22, "b": 30, "c": 12}, {"a": 1, "b": 1, "c": 28}]

READING = 50

EXERCISES = (
    Exercise(
        id="01.1",
        title="The first table",
        minutes=8,
        difficulty=1,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_first_table,
        hints=(
            "Keep two numbers for each request: tokens it has, tokens that are computed. What it "
            "lacks is the difference.",
            "In step 3, a lacks 22 tokens. How many of the 64 are left, and who is first in the "
            "queue?",
            "c's prompt needs two steps. b decodes once in each step after its prompt, until it "
            "has 3 tokens; the third is never computed.",
        ),
        wrong=(
            ([{"a": 150}, {"b": 30, "c": 40}], "more than 64 tokens in one step"),
            ([{"a": 64}, {"a": 34, "b": 30}], "anything left of the budget"),
            ([*_FIRST_RIGHT[:2], {"a": 22, "b": 30}, {}], "cut, not put off"),
            ([*_FIRST_RIGHT[:2], {"a": 22}], "'b' gets something too"),
            ([*_FIRST_RIGHT[:2], {"a": 22, "b": 30, "c": 40}], "more than 64"),
            ([*_FIRST_RIGHT[:3], {"b": 1, "c": 28}], "'a' is running"),
            ([*_FIRST_RIGHT[:3], {"a": 1, "b": 1, "c": 40}], "fewer tokens left"),
            ([*_FIRST_RIGHT], "still lacks tokens"),
            ([*_FIRST_RIGHT, {"b": 1}, {"b": 1}], "never an input"),
            ([*_FIRST_RIGHT, {"a": 1, "b": 1}], "got all it asked for"),
            ({"a": 150}, "a list with one dict"),
        ),
        right=(
            [*_FIRST_RIGHT, {"b": 1}],
            ({"a": 64, "b": 0}, *_FIRST_RIGHT[1:], {"b": np.int64(1)}),
        ),
    ),
    Exercise(
        id="01.2",
        title="Behind a long prompt",
        minutes=5,
        difficulty=1,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_behind,
        hints=(
            "Fill step 1: who is first, how much does it ask for, how much is there?",
            "In step 2 the long request runs and the short one waits. Who is served first?",
            "1,000 = 7 x 128 + 104.",
        ),
        wrong=(
            ({"long": 8, "short": 1}, "first in the queue"),
            ({"long": 8, "short": 2}, "running requests come first"),
            ({"long": 8, "short": 9}, "does not fill its step"),
            ({"long": 9, "short": 9}, "samples the first token as well"),
            ({"long": 7, "short": 8}, "fewer than 1000 tokens"),
            ({"long": 1, "short": 1}, "how many steps of 128"),
            ({"long": 8, "short": "8"}, "should be a number, and is a str"),
            (8, "keep the keys"),
        ),
        right=({"short": 8.0, "long": np.int64(8)},),
    ),
    Exercise(
        id="01.3",
        title="The cap, and for how long",
        minutes=10,
        difficulty=2,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_capped,
        hints=(
            "The short request takes part in as many steps as it generates tokens.",
            "While both are there the long one gets 64 tokens a step, although 128 would be there.",
            "For 4: 4 x 64 = 256 are computed when the short one ends. How many steps of 128 does "
            "the rest take?",
        ),
        wrong=(
            ({1: 16, 4: 16, 16: 16}, "Whom does it protect"),
            ({1: 8, 4: 8, 16: 8}, "without the threshold"),
            ({1: 9, 4: 9, 16: 9}, "the same for all three"),
            ({1: 8, 4: 10, 16: 16}, "one step too early"),
            ({1: 9, 4: 11, 16: 16}, "one step too late"),
            ({1: 8, 4: 9, 16: 15}, "count steps from 1"),
            ({1: 9, 4: 12, 16: 16}, "generates 4"),
            ({1: 9, 4: 10}, "keep the keys"),
        ),
        right=({4: 10, 16: 16.0, 1: 9},),
        after=("01.2",),
    ),
    Exercise(
        id="01.4",
        title="Write the scheduling step",
        minutes=20,
        difficulty=2,
        kind="build",
        roles=("backend", "kernel", "cache and storage"),
        check=_check_one_step,
        hints=(
            "Go through the running requests in order, then through the waiting ones. Each gets "
            "min(what it lacks, the cap, what is left of the budget).",
            "The cap is the threshold, but not if the threshold is 0, and not if there is one "
            "request in all, running and waiting together.",
            "Of the waiting ones, only the first max_num_seqs - len(running) may enter.",
        ),
        wrong=(
            *((formula, reason[:20]) for formula, reason in _STEP_MISTAKES),
            (lambda *_: {}, "In which order"),
            (lambda *_: None, "is a `return` missing"),
            (lambda *_: [1], "should be a dict"),
            (lambda running, waiting, *_: running | waiting, "more than the budget"),
            ({"a": 64}, "pass the function itself"),
        ),
        right=(
            lambda running, waiting, budget, threshold, seats: {
                name: np.int64(n)
                for name, n in _one_step(running, waiting, budget, threshold, seats).items()
            },
        ),
    ),
    Exercise(
        id="01.5",
        title="Break it: prefill first",
        minutes=12,
        difficulty=2,
        kind="break",
        roles=("backend", "platform/SRE", "solutions"),
        check=_check_prefill_first,
        hints=(
            "Two kinds of step: one of prompts only, one of decodes only.",
            "First give the prompts their tokens, in order, until the budget is used. Did anyone "
            "get something? Then that is the step.",
            "Otherwise {name: 1 for name in decoding}.",
        ),
        wrong=(
            (
                lambda d, p, b: _prefill_first(d, dict(sorted(p.items())), b),
                "what does the step consist of",
            ),
            *((formula, reason[:20]) for formula, reason in _CHOOSE_MISTAKES),
            (lambda decoding, prompts, budget: prompts or {"d": 1}, "its budget is 64"),
            (
                lambda decoding, prompts, budget: _prefill_first(["d"], prompts, budget),
                "no request 'd'",
            ),
            (lambda decoding, prompts, budget: {"z": 1}, "no request 'z'"),
            (lambda decoding, prompts, budget: {"d": 5}, "lacks 1 tokens and got 5"),
            (0, "pass the function itself"),
        ),
        right=(
            lambda decoding, prompts, budget: {
                **_prefill_first(decoding, prompts, budget),
                **(dict.fromkeys(decoding, 0) if prompts else {}),
            },
        ),
    ),
    Exercise(
        id="01.6",
        title="Thrown out, and back",
        minutes=10,
        difficulty=2,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_preempted,
        hints=(
            "60 tokens take four blocks, with four slots unused. Eight blocks: the pool is full "
            "from the start.",
            "Token 61 comes out of step 1 and goes in in step 2. Which step wants to write token "
            "65? And who gives way?",
            "The victim had computed 64 tokens. It will compute 65 when it comes back: those 64 "
            "again, and the one that it was about to.",
        ),
        wrong=(
            ({"victim": "x", "step": 6, "token-forwards": 242}, "admitted last"),
            ({"victim": "y", "step": 2, "token-forwards": 242}, "has room for"),
            ({"victim": "y", "step": 5, "token-forwards": 242}, "Not in step 5"),
            ({"victim": "y", "step": 7, "token-forwards": 242}, "Not in step 7"),
            ({"victim": "y", "step": 6, "token-forwards": 178}, "without recomputation"),
            ({"victim": "y", "step": 6, "token-forwards": 238}, "more than the prompt"),
            ({"victim": "y", "step": 6, "token-forwards": 243}, "close"),
            ({"victim": "y", "step": 6, "token-forwards": 180}, "once more what the victim"),
            ({"victim": "z", "step": 6, "token-forwards": 242}, 'is "x" or "y"'),
            ({"victim": "y", "step": 6}, "keep the keys"),
        ),
        right=({"victim": "y", "step": 6.0, "token-forwards": np.int64(242)},),
    ),
    Exercise(
        id="01.7",
        title="Break it: look one chunk ahead",
        minutes=12,
        difficulty=2,
        kind="break",
        roles=("backend", "cache and storage", "platform/SRE"),
        check=_check_short_sighted,
        hints=(
            "A takes 256 tokens in each of the steps 1 to 4. What does it lack in step 5?",
            "B gets 80 tokens in step 5 and, beside A's decode, 255 in each step after it.",
            "Write down, for each step from 5 on, the blocks of A (its first generated token wants "
            "one more than its prompt) and those of B with its next part. When are they over 100?",
        ),
        wrong=(
            (dict(zip(_CASE_4_KEYS, (76, 5, 7, 0), strict=True)), "1,200 tokens in blocks"),
            (dict(zip(_CASE_4_KEYS, (75, 1, 7, 0), strict=True)), "whole budget of step 1"),
            (dict(zip(_CASE_4_KEYS, (75, 6, 7, 0), strict=True)), "does not fill its step"),
            (dict(zip(_CASE_4_KEYS, (75, 2, 4, 0), strict=True)), "leave something"),
            (dict(zip(_CASE_4_KEYS, (75, 5, 6, 0), strict=True)), "blocks of step 6"),
            (dict(zip(_CASE_4_KEYS, (75, 5, 8, 0), strict=True)), "37 blocks"),
            (dict(zip(_CASE_4_KEYS, (75, 5, 7, 1), strict=True)), "Who is there to be thrown"),
            (75, "keep the keys"),
        ),
        right=(dict(zip(_CASE_4_KEYS, (75.0, 5, np.int64(7), 0), strict=True)),),
    ),
    Exercise(
        id="01.8",
        title="Urgent, and waiting",
        minutes=5,
        difficulty=2,
        kind="predict",
        roles=_OPERATORS,
        check=_check_urgent,
        hints=(
            "When may a waiting request enter? Two things have to be there for it.",
            "x generates 8 tokens: in the steps 1 to 8.",
        ),
        wrong=(
            ({"first token": 4, "preemptions": 1}, "does not push out"),
            ({"first token": 5, "preemptions": 0}, "does not push out"),
            ({"first token": 8, "preemptions": 0}, "still runs in step 8"),
            ({"first token": 13, "preemptions": 0}, "who ends first"),
            ({"first token": 9, "preemptions": 1}, "plenty of blocks"),
            ({"first token": 10, "preemptions": 0}, "for the first time"),
            (9, "keep the keys"),
        ),
        right=({"preemptions": 0.0, "first token": 9},),
    ),
    Exercise(
        id="01.9",
        title="Find the budget",
        minutes=8,
        difficulty=2,
        kind="measure",
        roles=_OPERATORS,
        check=_check_budget,
        hints=(
            "50 ms allow how many tokens in a step? That is the upper end.",
            "Each step gives the long prompt the budget less the 8 decodes. Fewer and fuller "
            "steps bring its first token earlier.",
            "With 150 there are 142 a step for the long prompt: 22 steps of 35 ms, too late. Go up "
            "from there with the function of the cell above.",
        ),
        wrong=(
            (2048, "50 are allowed: a smaller budget"),
            (512, "50 are allowed"),
            (308, "the decodes are in the budget, too"),
            (200, "however small it is"),
            (64, "however small it is"),
            (8, "however small it is"),
            (0, "at least 1"),
            (256.5, "a whole number"),
            ("256", "should be a number"),
        ),
        right=(300, 256, np.int64(280), 270.0),
    ),
    Exercise(
        id="01.10",
        title="Read the counters",
        minutes=10,
        difficulty=2,
        kind="explain",
        roles=("platform/SRE", "solutions", "backend"),
        check=_check_records,
        hints=(
            "Which record has preemptions? Which one never ran more than two at a time?",
            "61 steps are what 60 output tokens need if all eight run together and one came a step "
            "earlier. Who waits for a seat waits for others to *end*; who waits for budget does "
            "not.",
            "Compare the prompt and generation tokens of all four records.",
        ),
        wrong=(
            (
                _RECORDS | {"A": "KV pool too small", _RECOMPUTED: "none"},
                "A: 24 blocks of 32 hold",
            ),
            (
                _RECORDS | {"D": "KV pool too small", _RECOMPUTED: "none"},
                "D: 24 blocks of 32 hold",
            ),
            (_RECORDS | {"A": "small token budget", _RECOMPUTED: "none"}, "A: a small budget"),
            (
                _RECORDS | {"C": "few seats (max_num_seqs)", _RECOMPUTED: "none"},
                "C: two preemptions",
            ),
            (_RECORDS | {"C": "small token budget", _RECOMPUTED: "none"}, "C: two preemptions"),
            (
                _RECORDS | {"D": "few seats (max_num_seqs)", _RECOMPUTED: "none"},
                "D: seats limit how many",
            ),
            (_RECORDS | {"D": "nothing special", _RECOMPUTED: "none"}, "D: something held"),
            (_RECORDS | {"B": "shared prefix", _RECOMPUTED: "none"}, "B: then prompt tokens"),
            (_RECORDS | {_RECOMPUTED: "prompt tokens"}, "the same counter in B"),
            (_RECORDS | {_RECOMPUTED: "prefix_cache_hits_total"}, "the same counter in B"),
            (_RECORDS | {_RECOMPUTED: "num_preemptions_total"}, "How many tokens were lost"),
            (_RECORDS | {_RECOMPUTED: "steps"}, "does it count tokens"),
            (_RECORDS | {_RECOMPUTED: 256}, "the same counter in B"),
            (_RECORDS | {"A": "rain", _RECOMPUTED: "none"}, "choose one of"),
            (_RECORDS, "keep the keys"),
        ),
        right=(_RECORDS | {_RECOMPUTED: "None"}, _RECORDS | {_RECOMPUTED: None}),
    ),
    Exercise(
        id="01.11",
        title="Admission that keeps its promises",
        minutes=10,
        difficulty=3,
        kind="build",
        roles=("backend", "cache and storage"),
        check=_check_may_admit,
        hints=(
            "How many blocks does the whole prompt need? Round up.",
            "Free is not the same as available: promised blocks are free now, and those inside "
            "will take them.",
            "A prompt of 1,200 tokens is inside and has computed 256: in a pool of 100 blocks of "
            "16, 84 are free and 59 promised. On how many can a second prompt count?",
        ),
        wrong=(
            (lambda tokens, free, promised, size: -(-tokens // size) <= free, "half computed"),
            (lambda tokens, free, promised, size: free > 0, "still have to take"),
            (lambda tokens, free, promised, size: True, "still have to take"),
            (
                lambda tokens, free, promised, size: -(-tokens // 16) + promised <= free,
                "26 blocks of 32",
            ),
            (
                lambda tokens, free, promised, size: promised == 0 and -(-tokens // size) <= free,
                "would have fitted",
            ),
            (
                lambda tokens, free, promised, size: -(-tokens // size) + promised < free,
                "would have fitted",
            ),
            (
                lambda tokens, free, promised, size: tokens // size + promised <= free,
                "was thrown out",
            ),
            (lambda tokens, free, promised, size: False, "never admitted"),
            (lambda tokens, free, promised, size: tokens, "True or False"),
            (True, "pass the function itself"),
        ),
        right=(
            lambda tokens, free, promised, size: np.ceil(tokens / size) <= free - promised,
            lambda tokens, free, promised, size: tokens <= (free - promised) * size,
        ),
        after=("01.7",),
    ),
    Exercise(
        id="01.12",
        title="Three tables, one impossible",
        minutes=15,
        difficulty=3,
        kind="explain",
        roles=_EVERYBODY,
        check=_check_impossible,
        hints=(
            "Keep book: for each request the tokens that it has, and those that are computed. A "
            "token is sampled in the step in which the two meet.",
            "Odd is not impossible. For each odd step, look for settings under which it is what "
            "the rules give.",
            "What does a request that was thrown out have when it comes back, and what does it "
            "lack?",
        ),
        wrong=(
            ({"table": "A", "step": 4}, "A can happen"),
            ({"table": "C", "step": 4}, "C can happen"),
            ({"table": "B", "step": 6}, "step 6 can happen"),
            ({"table": "B", "step": 7}, "c would fit"),
            ({"table": "B", "step": 14}, "not that step"),
            ({"table": "B", "step": 2}, "not that step"),
            ({"table": "D", "step": 2}, 'is "A", "B" or "C"'),
            ("B", "keep the keys"),
        ),
        right=({"step": 13.0, "table": "B"},),
    ),
)
