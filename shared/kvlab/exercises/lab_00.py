"""Lab 00, one request: what it costs, and what its KV is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.check import Exercise, Wrong, number

READING = 45
"""Minutes that the chapter takes to read and run."""

# 00.1 -----------------------------------------------------------------------

_PROMPT, _OUTPUT = 60, 25
_WITHOUT = sum(range(_PROMPT, _PROMPT + _OUTPUT))
_WITH = _PROMPT + _OUTPUT - 1


def _check_forwards(answer: Any) -> str:
    if not isinstance(answer, dict) or set(answer) != {"without cache", "with cache"}:
        raise Wrong('keep the two keys "without cache" and "with cache"')
    without = number(answer["without cache"], '"without cache"')
    cached = number(answer["with cache"], '"with cache"')
    reasons = []
    if without == _WITHOUT + _OUTPUT:
        reasons.append("without cache: the first pass has the prompt alone, and no new token yet")
    elif without == _PROMPT * _OUTPUT:
        reasons.append("without cache: the sequence grows by one token after each pass")
    elif without != _WITHOUT:
        reasons.append(
            f"without cache: {_OUTPUT} passes, and each one runs the whole sequence so far. How "
            "long is it at the first pass, and at the last?"
        )
    if cached == _WITH + 1:
        reasons.append(
            "with cache: one too many. The last sampled token is returned to the user and never "
            "goes through the model"
        )
    elif cached != _WITH:
        reasons.append(
            "with cache: every token goes through the model once, when it is an input. Which "
            f"tokens of the {_PROMPT} + {_OUTPUT} are ever an input?"
        )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        f"{_PROMPT} + {_PROMPT + 1} + ... + {_PROMPT + _OUTPUT - 1} = {_WITHOUT:,} against "
        f"{_PROMPT} + {_OUTPUT - 1} = {_WITH}, for the same {_OUTPUT} tokens."
    )


# 00.2 -----------------------------------------------------------------------

Shapes = dict[str, int]
_SMOLLM2_135M = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
_LLAMA_2_7B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_QWEN3_32B = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN25_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_QWEN25_05B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
# name, shapes from the model's own config.json, bytes per value, bytes per token
_KV_CASES: tuple[tuple[str, Shapes, int, int], ...] = (
    ("SmolLM2-135M in bf16", _SMOLLM2_135M, 2, 23_040),
    ("SmolLM2-135M in float32", _SMOLLM2_135M, 4, 46_080),
    ("Llama-2-7B in fp16", _LLAMA_2_7B, 2, 524_288),
    ("Qwen3-32B in fp16", _QWEN3_32B, 2, 262_144),
    ("Qwen2.5-7B in fp16", _QWEN25_7B, 2, 57_344),
    ("Qwen2.5-0.5B in fp8", _QWEN25_05B, 1, 6_144),
)


def _head_dim(config: Shapes) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_bytes(config: Shapes, size: int, head_dim: int | None = None) -> int:
    """The right formula, where head_dim is not given."""
    head_dim = head_dim or _head_dim(config)
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * size


def _without_grouped_queries(config: Shapes, size: int) -> int:
    return 2 * config["num_hidden_layers"] * config["hidden_size"] * size


def _query_heads(config: Shapes, size: int) -> int:
    return (
        2 * config["num_hidden_layers"] * config["num_attention_heads"] * _head_dim(config) * size
    )


def _head_dim_by_division(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size, config["hidden_size"] // config["num_attention_heads"])


def _divided_by_kv_heads(config: Shapes, size: int) -> int:
    own = config.get("head_dim") or config["hidden_size"] // config["num_key_value_heads"]
    return _kv_bytes(config, size, own)


def _head_dim_64(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size, config.get("head_dim", 64))


def _head_dim_128(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size, config.get("head_dim", 128))


def _always_64(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size, 64)


def _always_bf16(config: Shapes, size: int) -> int:
    return _kv_bytes(config, 2)


def _only_keys(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size) // 2


def _one_layer(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size) // config["num_hidden_layers"]


def _in_kib(config: Shapes, size: int) -> float:
    return _kv_bytes(config, size) / 1024


def _in_bits(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size) * 8


# A formula that gives all of an answer's results is what its writer had in mind.
_KV_MISTAKES: tuple[tuple[Callable[[Shapes, int], float], str], ...] = (
    (
        _without_grouped_queries,
        "query heads share K and V (grouped-query attention), so hidden_size does not count them",
    ),
    (_query_heads, "query heads share K and V (grouped-query attention): count the KV heads"),
    (
        _head_dim_by_division,
        "this config states a head_dim, and it is not hidden_size / num_attention_heads",
    ),
    (
        _divided_by_kv_heads,
        "where no head_dim is stated, hidden_size is divided among the query heads",
    ),
    (_head_dim_64, "a head is not 64 numbers wide in every model"),
    (_head_dim_128, "a head is not 128 numbers wide in every model that does not say"),
    (_always_64, "a head is not 64 numbers wide in every model"),
    (_always_bf16, "the bytes per value are passed in; they are not always 2"),
    (_only_keys, "half of what it should be. K and V are both kept"),
    (_one_layer, "that is one layer's share"),
    (_in_kib, "that is in KiB; the exercise asks for bytes"),
    (_in_bits, "that is in bits; the exercise asks for bytes"),
)


def _check_kv_bytes(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function kv_bytes_per_token and pass the function itself")
    results = [
        number(answer(dict(config), size), f"the result for {name}")
        for name, config, size, _ in _KV_CASES
    ]
    differing = [
        (case, got) for case, got in zip(_KV_CASES, results, strict=True) if got != case[3]
    ]
    if not differing:
        return (
            "Llama-2-7B, without grouped queries, needs half a MiB for every token in fp16; "
            "Qwen2.5-7B a ninth of that."
        )
    reason = "how many vectors does a token leave behind in each layer, and how long is each?"
    for formula, its_reason in _KV_MISTAKES:
        if results == [formula(config, size) for _, config, size, _ in _KV_CASES]:
            reason = its_reason
            break
    (name, *_), got = differing[0]
    raise Wrong(f"{name}: {got:,} bytes is not right. {reason[0].upper()}{reason[1:]}")


def _needs_head_dim(config: Shapes, size: int) -> int:
    return _kv_bytes(config, size, config["head_dim"])


# 00.3 -----------------------------------------------------------------------

_CAUSES = {"kv-heads", "head-dim", "bits", "one-head", "latent"}

# figure, bytes as claimed, right bytes, its mistakes
_ERRATA: dict[str, tuple[int, int, set[str]]] = {
    "A": (2 * 4096 * 32 * 8, 2 * 32 * 8 * 128, {"kv-heads", "bits"}),
    "B": (2 * 36 * 8 * 80 * 2, 2 * 36 * 8 * 128 * 2, {"head-dim"}),
    "C": (2 * 27 * 512 * 2, 27 * (512 + 64) * 2, {"latent"}),
    "D": (2 * 40 * 128 * 2, 2 * 40 * 40 * 128 * 2, {"one-head"}),
}

_HALF = "a factor 2 is missing: K and V are both kept, and a number in fp16 has two bytes"

# A wrong number that tells what its writer had in mind.
_ERRATA_MISTAKES: dict[tuple[str, int], str] = {
    ("A", 2 * 4096 * 32): "its bytes a number are right now; which heads keep K and V?",
    ("A", 2 * 4096 * 32 * 2): "8 bits are how many bytes? And which heads keep K and V?",
    ("A", 2 * 32 * 8 * 128 * 2): "its heads are right now; 8 bits are how many bytes?",
    ("A", 2 * 32 * 8 * 128 * 8): "its heads are right now; 8 bits are how many bytes?",
    ("B", 36 * 8 * 128 * 2): _HALF,
    ("B", 2 * 36 * 32 * 80 * 2): "query heads share K and V: count the KV heads",
    ("B", 2 * 36 * 32 * 128 * 2): "query heads share K and V: count the KV heads",
    ("C", 27 * 512 * 2): "the latent is not all that a layer keeps for a token",
    ("C", 2 * 27 * (512 + 64) * 2): "attention makes K and V out of one and the same latent",
    ("C", 27 * 16 * (512 + 64) * 2): "the heads of a layer share its latent",
    ("C", 2 * 27 * 16 * 128 * 2): "that is K and V of every head; this model does not keep those",
    ("D", 40 * 40 * 128 * 2): _HALF,
    ("D", 2 * 40 * 128 * 2 * 32): "this model does not have 32 KV heads",
}


def _check_errata(answer: Any) -> str:
    if not isinstance(answer, dict) or set(answer) != set(_ERRATA):
        raise Wrong('keep the four keys "A", "B", "C" and "D"')
    reasons = []
    for name, (claimed, right, causes) in _ERRATA.items():
        pair = answer[name]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise Wrong(f"{name}: give a pair, the right bytes and a set of causes")
        got, given = number(pair[0], f"{name}, its bytes,"), pair[1]
        if isinstance(given, str):
            given = {given}
        if not isinstance(given, (set, frozenset, tuple, list)):
            raise Wrong(f'{name}: the causes should be a set, such as {{"bits"}}')
        if any(not isinstance(cause, str) or cause not in _CAUSES for cause in given):
            raise Wrong(f"{name}: the causes are names from the list: {', '.join(sorted(_CAUSES))}")
        if got == claimed:
            reasons.append(f"{name}: that is the published figure, and it is wrong")
        elif got != right:
            reason = _ERRATA_MISTAKES.get((name, int(got)), "what is kept, one layer, one token?")
            if got in (right / 1024, right / 2**20):
                reason = "the exercise asks for bytes"
            reasons.append(f"{name}: {got:,} bytes is not right; {reason}")
        elif set(given) != causes:
            more = len(causes) > len(set(given) & causes)
            reasons.append(
                f"{name}: the bytes are right, but "
                + (
                    "there is another cause"
                    if more and set(given) < causes
                    else "look at the causes again: which factor of the formula is wrong?"
                )
            )
    if reasons:
        raise Wrong("; ".join(reasons))
    return (
        "A claims 32 times too much (4 by the heads, 8 by the bits), B 1.6 times too little, C 1.8 "
        "times too much, D 40 times too little."
    )


_RIGHT_ERRATA = {name: (right, causes) for name, (_, right, causes) in _ERRATA.items()}


def _errata(**changed: Any) -> dict[str, Any]:
    return {**_RIGHT_ERRATA, **changed}


# 00.4 -----------------------------------------------------------------------

# KV memory in bytes, bytes per token, block size, prompt, output: requests that fit
_FIT_CASES: tuple[tuple[int, int, int, int, int, int], ...] = (
    (8 << 30, 57_344, 16, 2_000, 49, 73),
    (8 << 30, 57_344, 16, 2_000, 50, 72),
    (16 << 30, 524_288, 16, 32_000, 769, 1),
    (64 << 20, 46_080, 32, 100, 20, 11),
    (64 << 20, 46_080, 32, 1, 1, 45),
    (1 << 20, 46_080, 32, 33, 1, 0),
    (10 * 46_080, 46_080, 1, 4, 2, 2),
)

_Fit = Callable[[int, int, int, int, int], float]

_FIT_MISTAKES: tuple[tuple[_Fit, str], ...] = (
    (
        lambda m, t, b, p, o: m // (t * b) // -(-(p + o) // b),
        "the last sampled token has no KV, so it needs no room",
    ),
    (
        lambda m, t, b, p, o: m // (t * (p + o - 1)),
        "a request gets whole blocks, and nobody else may use what is left of its last one",
    ),
    (
        lambda m, t, b, p, o: m // (t * (p + o)),
        "a request gets whole blocks, and nobody else may use what is left of its last one",
    ),
    (
        lambda m, t, b, p, o: m // (t * b) // max(1, (p + o - 1) // b),
        "the last tokens need a block too, full or not",
    ),
    (
        lambda m, t, b, p, o: m // (t * b) // -(-p // b),
        "at its end a request holds KV of generated tokens as well",
    ),
    (
        lambda m, t, b, p, o: m // (t * b) // (-(-p // b) + -(-(o - 1) // b)),
        "a block that the prompt began is filled up by the output: round once",
    ),
    (
        lambda m, t, b, p, o: m // (t * b) // (-(-p // b) + -(-o // b)),
        "a block that the prompt began is filled up by the output: round once",
    ),
    (lambda m, t, b, p, o: m // (t * b), "that is the number of blocks"),
    (
        lambda m, t, b, p, o: -(-(m // (t * b)) // -(-(p + o - 1) // b)),
        "a request that does not fit whole does not fit",
    ),
    (
        lambda m, t, b, p, o: m / (t * b) / -(-(p + o - 1) // b),
        "requests are whole: what is left over holds none",
    ),
)


def _check_fit(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function requests_that_fit and pass the function itself")
    results = [number(answer(*case[:-1]), "the result") for case in _FIT_CASES]
    differing = [
        (case, got) for case, got in zip(_FIT_CASES, results, strict=True) if got != case[-1]
    ]
    if not differing:
        return "Blocks in the memory, divided by blocks of one request at its longest."
    reason = "how many blocks are there, and how many does one request hold when it is longest?"
    for formula, its_reason in _FIT_MISTAKES:
        if results == [formula(*case[:-1]) for case in _FIT_CASES]:
            reason = its_reason
            break
    (memory, per_token, block, prompt, output, _), got = differing[0]
    raise Wrong(
        f"{memory:,} bytes of KV memory, {per_token:,} bytes a token, blocks of {block}, "
        f"{prompt:,} + {output:,} tokens: {got:,} is not right. {reason[0].upper()}{reason[1:]}"
    )


# 00.5 -----------------------------------------------------------------------

# bytes of weights, KV bytes per token, contexts of the requests in the batch: bytes per new token
_READ_CASES: tuple[tuple[int, int, list[int], float], ...] = (
    (269_030_016, 23_040, [1_000], 292_070_016),
    (269_030_016, 23_040, [1_000] * 8, 56_668_752),
    (15_000_000_000, 131_072, [500, 4_000, 12_000, 20], 4_291_327_360),
    (15_000_000_000, 131_072, [1, 1], 7_500_131_072),
)

_Read = Callable[[int, int, list[int]], float]

_READ_MISTAKES: tuple[tuple[_Read, str], ...] = (
    (
        lambda w, t, c: w + sum(c) * t,
        "that is what the whole step reads. How many new tokens does the step give?",
    ),
    (
        lambda w, t, c: w + sum(c) * t / len(c),
        "one pass serves all requests of the batch: how often are the weights read in it?",
    ),
    (
        lambda w, t, c: len(c) * w + sum(c) * t,
        "one pass serves all requests of the batch: how often are the weights read in it?",
    ),
    (lambda w, t, c: w / len(c), "a step reads the KV of its requests as well"),
    (
        lambda w, t, c: w / len(c) + sum(c) * t,
        "now the weights are shared among the new tokens, and the KV is counted for all of them",
    ),
    (
        lambda w, t, c: w / len(c) + sum(c) * t / len(c) ** 2,
        "requests do not share KV: each one reads its own",
    ),
    (lambda w, t, c: (w + max(c) * t) / len(c), "requests do not share KV: each one reads its own"),
    (lambda w, t, c: (w + c[0] * t) / len(c), "requests do not share KV: each one reads its own"),
    (
        lambda w, t, c: w / len(c) + max(c) * t,
        "the requests have contexts of different lengths, and each one reads its own",
    ),
    (
        lambda w, t, c: (w + len(c) * t) / len(c),
        "the token that goes in looks back at all tokens of its request, not only at itself",
    ),
    (
        lambda w, t, c: (w + sum(x - 1 for x in c) * t) / len(c),
        "the token that goes in has KV as well, and it is looked at too: `contexts` counts it, so "
        "nothing has to be taken off",
    ),
    (
        lambda w, t, c: (w + sum(x + 1 for x in c) * t) / len(c),
        "`contexts` counts the token that goes in already, and the one that comes out has no KV "
        "yet: nothing has to be added",
    ),
)


def _check_read(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function bytes_per_new_token and pass the function itself")
    results = [number(answer(w, t, list(c)), "the result") for w, t, c, _ in _READ_CASES]
    differing = [
        (case, got)
        for case, got in zip(_READ_CASES, results, strict=True)
        if abs(got - case[3]) > 0.5 + 1e-6 * case[3]  # float32 is a right way to compute it, too
    ]
    if not differing:
        return (
            "Eight requests of 1,000 tokens share one reading of the weights: 269 MB become 34 MB "
            "a token. The 23 MB of KV that each token reads stay what they are."
        )
    reason = "what does a step read once, what once for each request, and how many tokens come out?"
    for formula, its_reason in _READ_MISTAKES:
        if all(
            abs(got - formula(w, t, c)) <= 1
            for got, (w, t, c, _) in zip(results, _READ_CASES, strict=True)
        ):
            reason = its_reason
            break
    (weights, per_token, contexts, _), got = differing[0]
    shown = f"{len(contexts)} of {contexts[0]:,}" if len(contexts) > 4 else f"{contexts}"
    raise Wrong(
        f"weights {weights:,}, KV {per_token:,} a token, contexts {shown}: {got:,.0f} is not "
        f"right. {reason[0].upper()}{reason[1:]}"
    )


# 00.6 -----------------------------------------------------------------------

# prompt tokens, output tokens, block size, reusable tokens of the finished request
_REUSE_CASES = (
    (100, 60, 32, 128),
    (100, 50, 1, 149),
    (100, 50, 16, 144),
    (100, 29, 32, 128),
    (100, 28, 32, 96),
    (20, 30, 32, 32),
    (31, 1, 32, 0),
    (32, 1, 32, 32),
    (33, 32, 32, 64),
)

_REUSE_MISTAKES: tuple[tuple[Callable[[int, int, int], int], str], ...] = (
    (
        lambda p, o, b: (p + o) // b * b,
        "that counts KV of a token that was never an input. Which token of the sequence has not "
        "been through the model when the request ends?",
    ),
    (lambda p, o, b: p + o - 1, "that is every token with KV; an engine finds full blocks only"),
    (lambda p, o, b: -(-(p + o - 1) // b) * b, "a block that is not full cannot be found again"),
    (lambda p, o, b: p // b * b, "KV of generated tokens can be found again as well"),
    (lambda p, o, b: (p - 1) // b * b, "KV of generated tokens can be found again as well"),
    (lambda p, o, b: p // b * b + o // b * b, "blocks do not begin anew where the output begins"),
    (lambda p, o, b: (p + o - 1) // b, "that is a number of blocks; the exercise asks for tokens"),
    (lambda p, o, b: (p + o) // b, "that is a number of blocks; the exercise asks for tokens"),
    (lambda p, o, b: (p + o - 2) // b * b, "only one token was never an input"),
    (
        lambda p, o, b: (p + o - 1) // b * b if p >= b else 0,
        "a block may begin in the prompt and end in the output",
    ),
)


def _check_reusable(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function reusable_tokens and pass the function itself")
    results = [number(answer(p, o, b), "the result") for p, o, b, _ in _REUSE_CASES]
    differing = [
        (case, got) for case, got in zip(_REUSE_CASES, results, strict=True) if got != case[3]
    ]
    if not differing:
        return "prompt + output - 1 tokens have KV; full blocks of them can be found again."
    reason = "which tokens have KV when the request ends, and how many full blocks do they fill?"
    for formula, its_reason in _REUSE_MISTAKES:
        if results == [formula(p, o, b) for p, o, b, _ in _REUSE_CASES]:
            reason = its_reason
            break
    (prompt, output, block, _), got = differing[0]
    raise Wrong(
        f"{prompt} prompt and {output} output tokens in blocks of {block}: {got:,} is not right. "
        f"{reason[0].upper()}{reason[1:]}"
    )


# 00.7 -----------------------------------------------------------------------

Reading = dict[str, int]


def _reading(prompt: int, hits: int, generated: int, requests: int, iteration: int) -> Reading:
    return {
        "prompt_tokens_total": prompt,
        "prefix_cache_queries_total": prompt,
        "prefix_cache_hits_total": hits,
        "generation_tokens_total": generated,
        "request_success_total": requests,
        "iteration_tokens_total_sum": iteration,
    }


# As vLLM 0.32.0 gave them: block size 32, SmolLM2-135M, --no-async-scheduling, nothing preempted,
# all ended by length. Between two readings: 100 in, 29 out; the same prompt, 1 out; a follow-up of
# 169, 10 out; four at once, 64 in, 12 out.
_READINGS = (
    _reading(0, 0, 0, 0, 0),
    _reading(100, 0, 29, 1, 129),
    _reading(200, 96, 30, 2, 134),
    _reading(369, 224, 40, 3, 185),
    _reading(625, 224, 88, 7, 489),
)
# pairs of readings, and the tokens that went through the model: computed prompt tokens and all
# generated ones but the last of each request
_COUNTER_CASES = (
    (1, 2, 4),
    (0, 1, 128),
    (2, 3, 41 + 9),
    (3, 4, 4 * 64 + 4 * 11),
    (0, 4, 128 + 4 + 50 + 300),
)


def _delta(before: Reading, after: Reading, name: str) -> int:
    return after[name] - before[name]


def _token_forwards(before: Reading, after: Reading) -> int:
    """The right formula."""
    prompt = _delta(before, after, "prompt_tokens_total")
    computed = prompt - _delta(before, after, "prefix_cache_hits_total")
    generated = _delta(before, after, "generation_tokens_total")
    return computed + generated - _delta(before, after, "request_success_total")


_COUNTER_MISTAKES: tuple[tuple[Callable[[Reading, Reading], int], str], ...] = (
    (
        lambda b, a: (
            _delta(b, a, "prompt_tokens_total")
            - _delta(b, a, "prefix_cache_hits_total")
            + _delta(b, a, "generation_tokens_total")
        ),
        "one token of every request was generated and never was an input "
        "(iteration_tokens_total_sum counts it, too)",
    ),
    (
        lambda b, a: _delta(b, a, "prompt_tokens_total") + _delta(b, a, "generation_tokens_total"),
        "prompt tokens that were found in the cache do not go through the model, and of the "
        "generated ones not all do",
    ),
    (
        lambda b, a: (
            _delta(b, a, "prompt_tokens_total")
            + _delta(b, a, "generation_tokens_total")
            - _delta(b, a, "request_success_total")
        ),
        "prompt tokens that were found in the cache do not go through the model",
    ),
    (
        lambda b, a: (
            _delta(b, a, "prompt_tokens_total")
            - _delta(b, a, "prefix_cache_hits_total")
            + _delta(b, a, "generation_tokens_total")
            - 1
        ),
        "one token of every request was generated and never was an input; how many requests were "
        "there between the two readings?",
    ),
    (
        lambda b, a: _delta(b, a, "prompt_tokens_total") - _delta(b, a, "prefix_cache_hits_total"),
        "that is prefill. Decode sends tokens through the model too",
    ),
    (
        lambda b, a: _token_forwards(_READINGS[0], a),
        "counters count since the server started; the exercise asks what lay between two readings",
    ),
)


def _check_counters(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function token_forwards_between and pass the function itself")
    pairs = [(_READINGS[i], _READINGS[j]) for i, j, _ in _COUNTER_CASES]
    results = [number(answer(dict(b), dict(a)), "the result") for b, a in pairs]
    differing = [
        (case, got) for case, got in zip(_COUNTER_CASES, results, strict=True) if got != case[2]
    ]
    if not differing:
        return (
            "Computed prompt tokens, and of each request all generated tokens but the last. No "
            "single one of these counters says this number; two are enough: "
            "iteration_tokens_total_sum, less request_success_total."
        )
    reason = "which prompt tokens, and which generated tokens, are an input of the model?"
    for formula, its_reason in _COUNTER_MISTAKES:
        if results == [formula(b, a) for b, a in pairs]:
            reason = its_reason
            break
    (first, second, _), got = differing[0]
    raise Wrong(
        f"between readings {first} and {second}: {got:,} is not right. "
        f"{reason[0].upper()}{reason[1:]}"
    )


# 00.8 -----------------------------------------------------------------------

Tokens = list[int]
_Found = Callable[[Tokens, Tokens, Tokens, int], int]

_P = list(range(1_000, 1_160))  # 160 different tokens, and as many more
_A = list(range(2_000, 2_160))
_NEW = list(range(3_000, 3_040))


def _edited(tokens: Tokens, *places: int) -> Tokens:
    return [-token if i in places else token for i, token in enumerate(tokens)]


def _swapped(tokens: Tokens, one: int, other: int) -> Tokens:
    swapped = list(tokens)
    swapped[one], swapped[other] = tokens[other], tokens[one]
    return swapped


# what the next request is; prompt, answer, next prompt, block size; tokens found
_FOUND_CASES: tuple[tuple[str, Tokens, Tokens, Tokens, int, int], ...] = (
    ("the chat goes on", _P[:100], _A[:50], _P[:100] + _A[:50] + _NEW, 32, 128),
    ("the chat goes on", _P[:100], _A[:60], _P[:100] + _A[:60] + _NEW, 32, 128),
    ("the same prompt again", _P[:96], _A[:33], _P[:96], 32, 64),
    ("the same prompt again", _P[:97], _A[:33], _P[:97], 32, 96),
    ("prompt and answer, and nothing new", _P[:100], _A[:29], _P[:100] + _A[:29], 32, 128),
    ("token 70 was edited", _P[:100], _A[:60], _edited(_P[:100] + _A[:60], 70), 32, 64),
    ("token 64 was edited", _P[:100], _A[:60], _edited(_P[:100] + _A[:60], 64), 32, 64),
    ("a token was put in front", _P[:100], _A[:60], [7, *_P[:100], *_A[:60]], 32, 0),
    ("token 0 was edited", _P[:100], _A[:60], _edited(_P[:100] + _A[:60], 0), 32, 0),
    ("the answer was replaced", _P[:100], _A[:60], _P[:100] + _NEW, 32, 96),
    ("the beginning of the prompt", _P[:100], _A[:60], _P[:40], 32, 32),
    ("full blocks of the prompt, and nothing new", _P[:96], _A[:33], _P[:64], 32, 32),
    (
        "the beginning of the answer, up to a full block",
        _P[:100],
        _A[:60],
        _P[:100] + _A[:28],
        32,
        96,
    ),
    ("the first 32 tokens were cut off", _P[:100], _A[:60], _P[32:100] + _A[:60], 32, 0),
    ("token 10 was taken out", _P[:100], _A[:60], _P[:10] + _P[11:100] + _A[:60], 32, 0),
    ("two tokens changed places", _P[:100], _A[:60], _swapped(_P[:100] + _A[:60], 40, 50), 32, 32),
    ("a prompt that repeats itself", [5] * 100, _A[:60], [5] * 70 + _NEW, 32, 64),
    ("the answer had one token", _P[:64], _A[:1], _P[:64] + _A[:1] + _NEW, 16, 64),
    ("the chat goes on", _P[:10], _A[:3], _P[:10] + _A[:3] + _NEW, 4, 12),
    ("the chat goes on", _P[:10], _A[:2], _P[:10] + _A[:2] + _NEW, 4, 8),
)


def _same(a: Tokens, b: Tokens) -> int:
    """Tokens that two sequences have in common from their start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _found(p: Tokens, a: Tokens, n: Tokens, b: int) -> int:
    """The right formula."""
    return min(_same((p + a)[:-1], n), len(n) - 1) // b * b


def _equal_anywhere(p: Tokens, a: Tokens, n: Tokens, b: int) -> int:
    """Blocks compared one by one, whatever stands before them."""
    kept = (p + a)[:-1]
    full = min(len(kept), len(n) - 1) // b
    return sum(kept[i * b : i * b + b] == n[i * b : i * b + b] for i in range(full)) * b


def _known_tokens(p: Tokens, a: Tokens, n: Tokens, b: int) -> int:
    """As far as every token stands somewhere in the finished request."""
    kept = set((p + a)[:-1])
    known = next((i for i, token in enumerate(n) if token not in kept), len(n))
    return min(known, len(n) - 1) // b * b


def _known_blocks(p: Tokens, a: Tokens, n: Tokens, b: int) -> int:
    """As far as every block stands somewhere in the finished request: a hash without a parent."""
    kept = (p + a)[:-1]
    blocks = [kept[i : i + b] for i in range(0, len(kept) - b + 1, b)]
    full = (len(n) - 1) // b * b
    return next((i for i in range(0, full, b) if n[i : i + b] not in blocks), full)


_FOUND_MISTAKES: tuple[tuple[_Found, str], ...] = (
    (
        lambda p, a, n, b: (len(p) + len(a) - 1) // b * b,
        "that is what the finished request left. What does the next one have in common with it?",
    ),
    (
        lambda p, a, n, b: min(len(p) + len(a) - 1, len(n) - 1) // b * b,
        "lengths are not enough: the tokens have to be the same, from the first one on",
    ),
    (
        lambda p, a, n, b: _same((p + a)[:-1], n) // b * b,
        "the next request needs scores for what follows its last token. Can all of its tokens "
        "come from the cache?",
    ),
    (
        lambda p, a, n, b: (_same((p + a)[:-1], n) - (n == p)) // b * b,
        "not only where the same prompt comes again: the last token of every next prompt goes "
        "through the model",
    ),
    (
        lambda p, a, n, b: (
            min(_same((p + a)[:-1], n), len(n) - 1 if len(n) <= len(p) else len(n)) // b * b
        ),
        "a next prompt can end inside the answer too, and its last token goes through the model "
        "wherever it ends",
    ),
    (
        lambda p, a, n, b: min(_same(p + a, n), len(n) - 1) // b * b,
        "one token of the finished request has no KV",
    ),
    (
        lambda p, a, n, b: _same(p + a, n) // b * b,
        "which token of the finished request has no KV, and which token of the next one has to "
        "go through the model in any case?",
    ),
    (
        lambda p, a, n, b: min(_same((p + a)[:-1], n), len(n) - 1),
        "an engine finds full blocks only",
    ),
    (
        lambda p, a, n, b: min(_same((p + a)[:-1], n) // b * b, len(n) - 1),
        "what is found is a number of full blocks in every case",
    ),
    (
        lambda p, a, n, b: (_same(p + a, n) - 1) // b * b,
        "two different tokens can be missing: the last one sampled by the finished request, and "
        "the last one of the next prompt. Where the two requests part earlier, neither matters",
    ),
    (
        lambda p, a, n, b: max(0, _same(p + a, n) - 1) // b * b,
        "two different tokens can be missing: the last one sampled by the finished request, and "
        "the last one of the next prompt. Where the two requests part earlier, neither matters",
    ),
    (
        lambda p, a, n, b: min(_same(p, n), len(n) - 1) // b * b,
        "KV of generated tokens can be found again as well",
    ),
    (
        lambda p, a, n, b: (
            min(sum(x == y for x, y in zip((p + a)[:-1], n, strict=False)), len(n) - 1) // b * b
        ),
        "KV depends on all tokens before: after the first difference nothing fits any more",
    ),
    *(
        (
            formula,
            "equal tokens in another place do not help: their KV depends on all tokens before them",
        )
        for formula in (_known_tokens, _known_blocks)
    ),
    (
        _equal_anywhere,
        "KV depends on all tokens before: after the first difference nothing fits any more",
    ),
    (
        lambda p, a, n, b: min(len(set((p + a)[:-1]) & set(n)), len(n) - 1) // b * b,
        "a prefix counts from the first token: what stands elsewhere does not fit",
    ),
    (
        lambda p, a, n, b: min(_same((p + a)[:-1], n), len(n) - 1) // b,
        "that is a number of blocks; the exercise asks for tokens",
    ),
    (
        lambda p, a, n, b: -(-min(_same((p + a)[:-1], n), len(n) - 1) // b) * b,
        "a block that is not full cannot be found again",
    ),
)


def _check_found(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function found_tokens and pass the function itself")
    results = [
        number(answer(list(p), list(a), list(n), b), "the result")
        for _, p, a, n, b, _ in _FOUND_CASES
    ]
    differing = [
        (case, got) for case, got in zip(_FOUND_CASES, results, strict=True) if got != case[-1]
    ]
    if not differing:
        return (
            "The common prefix, no further than the KV that exists, one token short of the next "
            "prompt, in full blocks. Chapter 02 builds the cache that works so."
        )
    reason = "where do the two requests part, and which of the tokens before that have KV?"
    for formula, its_reason in _FOUND_MISTAKES:
        if results == [formula(*case[1:-1]) for case in _FOUND_CASES]:
            reason = its_reason
            break
    (what, prompt, reply, following, block, _), got = differing[0]
    raise Wrong(
        f"{len(prompt)} + {len(reply)} tokens, then {len(following)} ({what}), blocks of {block}: "
        f"{got:,} is not right. {reason[0].upper()}{reason[1:]}"
    )


_EVERYBODY = ("backend", "kernel", "cache and storage", "platform/SRE", "solutions")

EXERCISES = (
    Exercise(
        id="00.1",
        title="Count the token-forwards",
        minutes=5,
        difficulty=1,
        kind="predict",
        roles=_EVERYBODY,
        check=_check_forwards,
        hints=(
            "Write down the length of the input of the first three passes, once without and once "
            "with the cache.",
            "With the cache the first pass takes the whole prompt (prefill) and every later pass "
            f"takes one token (decode). {_OUTPUT} tokens need {_OUTPUT} passes.",
            f"The first pass already yields token 1 of {_OUTPUT}. Token {_OUTPUT} is sampled and "
            "then we stop.",
        ),
        wrong=(
            ({"without cache": 1800, "with cache": 85}, "one too many"),
            ({"without cache": 1825, "with cache": 84}, "the first pass has the prompt alone"),
            ({"without cache": 1500, "with cache": 84}, "the sequence grows"),
            ({"without cache": 2125, "with cache": 25}, "ever an input"),
            ({"without cache": 84, "with cache": 1800}, "without cache: 25 passes"),
            ({"without cache": 1825, "with cache": 85}, "one too many"),
            ({"without cache": "1800", "with cache": "84"}, "should be a number, and is a str"),
            ({"without cache": True, "with cache": 84}, "should be a number, and is a bool"),
            (1800, "keep the two keys"),
        ),
        right=(
            {"without cache": np.arange(60, 85).sum(), "with cache": 84.0},
            {"with cache": 84, "without cache": 1800},
        ),
    ),
    Exercise(
        id="00.2",
        title="KV bytes per token",
        minutes=10,
        difficulty=1,
        kind="build",
        roles=_EVERYBODY,
        check=_check_kv_bytes,
        hints=(
            "For each layer and each KV head, one token leaves a key vector and a value vector of "
            "head_dim numbers.",
            "config.get('head_dim') is None where a config does not state it.",
            "First one layer and one KV head: how many numbers does a token leave there? Then: how "
            "many such places has the model, and how many bytes has a number? For SmolLM2-135M in "
            "bf16 23,040 must come out.",
        ),
        wrong=(
            (_head_dim_128, "128 numbers wide in every model"),
            (_without_grouped_queries, "hidden_size does not count them"),
            (_query_heads, "count the KV heads"),
            (_head_dim_by_division, "Qwen3-32B in fp16: .* states a head_dim"),
            (_divided_by_kv_heads, "Qwen2.5-7B in fp16: .* among the query"),
            (_head_dim_64, "Llama-2-7B in fp16: .* not 64 numbers wide"),
            (_always_64, "not 64 numbers wide"),
            (_always_bf16, "float32: .* not always 2"),
            (_only_keys, "K and V are both kept"),
            (_one_layer, "one layer's share"),
            (_in_kib, "in KiB"),
            (_in_bits, "in bits"),
            (_needs_head_dim, "KeyError: 'head_dim'"),
            (lambda config, size: None, "is None: is a `return` missing"),
            (lambda config, size: 23_040, "float32: 23,040 bytes is not right"),
            (lambda config, size: float("nan"), "no number that could be"),
            (lambda config, size: 10**5000, "no number that could be"),
            (23_040, "pass the function itself"),
        ),
        right=(
            lambda config, size: np.int64(_kv_bytes(config, size)),
            lambda config, size: float(_kv_bytes(config, size)),
        ),
    ),
    Exercise(
        id="00.3",
        title="Find the errors",
        minutes=10,
        difficulty=2,
        kind="explain",
        roles=("backend", "cache and storage", "platform/SRE", "solutions"),
        check=_check_errata,
        hints=(
            "Write each figure as a product and name its factors: K and V, layers, heads, numbers "
            "a head, bytes a number. Which factor is missing, and which is another than it should "
            "be?",
            "A has two mistakes, the others have one each. A byte has 8 bits. B: look at the "
            "config once more. D: how many heads does its product count?",
            "C keeps neither K nor V. For each token a layer keeps one latent of 512 numbers and "
            "one key of 64 that says where the token stands; the heads share both.",
        ),
        wrong=(
            (_errata(A=(2_097_152, {"kv-heads", "bits"})), "A: that is the published figure"),
            (_errata(A=(262_144, {"bits"})), "A: .* which heads keep K and V"),
            (_errata(A=(131_072, {"kv-heads"})), "A: .* 8 bits are how many bytes"),
            (_errata(A=(65_536, {"kv-heads"})), "A: .* another cause"),
            (_errata(A=(64, {"kv-heads", "bits"})), "A: .* asks for bytes"),
            (_errata(B=(92_160, {"head-dim"})), "B: that is the published figure"),
            (_errata(B=(147_456, {"kv-heads"})), "B: .* causes again"),
            (_errata(B=(589_824, {"head-dim"})), "B: .* query heads share"),
            (_errata(B=(147_456, {"head-dim", "kv-heads"})), "B: .* causes again"),
            (_errata(C=(27_648, {"latent"})), "C: .* not all that a layer keeps"),
            (_errata(C=(62_208, {"latent"})), "C: .* one and the same latent"),
            (_errata(C=(497_664, {"latent"})), "C: .* share its latent"),
            (_errata(D=(655_360, {"one-head"})), "D: .* does not have 32 KV heads"),
            (_errata(D=(409_600, {"one-head"})), "D: .*"),
            (_errata(D=(819_200, {"heads"})), "D: the causes are names from the list"),
            (_errata(D=(819_200, 1)), "D: the causes should be a set"),
            (_errata(D=819_200), "D: give a pair"),
            ({"A": (65_536, {"kv-heads", "bits"})}, "keep the four keys"),
            (65_536, "keep the four keys"),
        ),
        right=(
            _RIGHT_ERRATA,
            {name: [np.int64(b), sorted(causes)] for name, (b, causes) in _RIGHT_ERRATA.items()},
            _errata(B=(147_456.0, "head-dim")),
        ),
    ),
    Exercise(
        id="00.4",
        title="How many requests fit",
        minutes=8,
        difficulty=2,
        kind="build",
        roles=("backend", "cache and storage", "platform/SRE", "solutions"),
        check=_check_fit,
        hints=(
            "Two numbers of blocks: those in the memory, and those that one request holds when it "
            "is about to end.",
            "A request at its end has prompt + output - 1 tokens with KV. A block that is begun is "
            "taken whole: round up, once.",
            "-(-n // block_size) is n / block_size rounded up. What is left over of the memory "
            "when all whole requests are in holds none: round down.",
        ),
        wrong=(
            *((formula, reason[:25]) for formula, reason in _FIT_MISTAKES),
            (lambda m, t, b, p, o: 73, "how many blocks are there"),
            (lambda m, t, b, p, o: None, "is None"),
            (73, "pass the function itself"),
        ),
        right=(
            lambda m, t, b, p, o: int(m / (t * b)) // int(np.ceil((p + o - 1) / b)),
            lambda m, t, b, p, o: float(m // (t * b * -(-(p + o - 1) // b))),
        ),
    ),
    Exercise(
        id="00.5",
        title="What a new token makes the machine read",
        minutes=8,
        difficulty=2,
        kind="build",
        roles=_EVERYBODY,
        check=_check_read,
        hints=(
            "First the bytes of the whole step: what is read once whatever the batch, and what is "
            "read for each request?",
            "A decode step gives every request of the batch one new token. So divide by the number "
            "of requests.",
            "The step reads the weights once, and for each request the KV of its own context.",
        ),
        wrong=(
            *((formula, reason[:25]) for formula, reason in _READ_MISTAKES),
            (lambda w, t, c: 292_070_016, "how many tokens come out"),
            (lambda w, t, c: None, "is None"),
            (292_070_016, "pass the function itself"),
        ),
        right=(
            lambda w, t, c: w / len(c) + t * np.mean(c),
            lambda w, t, c: (w + t * sum(c)) // len(c),
        ),
    ),
    Exercise(
        id="00.6",
        title="What is left to reuse",
        minutes=8,
        difficulty=2,
        kind="build",
        roles=("backend", "cache and storage", "solutions"),
        check=_check_reusable,
        hints=(
            "Token i gets its KV when token i is an input of the model. When is the last sampled "
            "token an input?",
            "prompt + output - 1 tokens have KV. Now put them into blocks.",
            "Round down to a multiple of the block size: divide without a rest, then multiply.",
        ),
        wrong=(
            *((formula, reason[:20]) for formula, reason in _REUSE_MISTAKES),
            (lambda p, o, b: 128, "how many full blocks"),
            (lambda p, o, b: float("nan"), "no number that could be"),
            (128, "pass the function itself"),
        ),
        right=(lambda prompt, output, block: np.floor((prompt + output - 1) / block) * block,),
    ),
    Exercise(
        id="00.7",
        title="Read the counters",
        minutes=8,
        difficulty=2,
        kind="measure",
        roles=("backend", "platform/SRE", "solutions"),
        after=("00.1",),
        check=_check_counters,
        hints=(
            "Take readings 0 and 1, one request of 100 + 29 tokens, and count by hand as in 00.1. "
            "Which counters give your number?",
            "Prompt tokens that were found in the cache are not computed. How many generated "
            "tokens of one request are an input?",
            "The last token of every request never goes in, and request_success_total counts the "
            "requests that have ended.",
        ),
        wrong=(
            *((formula, reason[:25]) for formula, reason in _COUNTER_MISTAKES),
            (lambda b, a: _delta(b, a, "iteration_tokens_total_sum"), "counts it, too"),
            (lambda b, a: 4, "which generated tokens"),
            (lambda b, a: _delta(b, a, "prompt_tokens"), "KeyError: 'prompt_tokens'"),
            (128, "pass the function itself"),
        ),
        right=(
            lambda before, after: np.int64(_token_forwards(before, after)),
            lambda before, after: (
                _delta(before, after, "iteration_tokens_total_sum")
                - _delta(before, after, "request_success_total")
            ),
        ),
    ),
    Exercise(
        id="00.8",
        title="What will the next request find",
        minutes=15,
        difficulty=3,
        kind="build",
        roles=("backend", "cache and storage", "solutions"),
        after=("00.6",),
        check=_check_found,
        hints=(
            "Make the list of tokens that have KV, in order. Then walk along it and the next "
            "prompt until two tokens differ.",
            "The next request must send at least one token through the model: the scores for its "
            "first new token come out of its last prompt token.",
            "Three limits (common prefix, KV that exists, next prompt less one token): take the "
            "smallest, then round down to full blocks.",
        ),
        wrong=(
            *((formula, reason[:25]) for formula, reason in _FOUND_MISTAKES),
            (lambda p, a, n, b: 128, "where do the two requests part"),
            (lambda p, a, n, b: None, "is None"),
            (lambda p, a, n, b: n.pop() and 0, "is not right"),
            (128, "pass the function itself"),
        ),
        right=(
            _found,
            lambda p, a, n, b: np.int64(_found(p, a, n, b)),
        ),
    ),
)
