"""Lab 00, one request: what it costs, and what its KV is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvlab.check import Exercise, Wrong, number

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
# name, shapes from the model's own config.json, bytes per value, bytes per token
_KV_CASES: tuple[tuple[str, Shapes, int, int], ...] = (
    ("SmolLM2-135M in bf16", _SMOLLM2_135M, 2, 23_040),
    ("SmolLM2-135M in float32", _SMOLLM2_135M, 4, 46_080),
    ("Llama-2-7B in fp16", _LLAMA_2_7B, 2, 524_288),
    ("Qwen3-32B in fp16", _QWEN3_32B, 2, 262_144),
    ("Qwen2.5-7B in fp16", _QWEN25_7B, 2, 57_344),
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
        "where no head_dim is stated, hidden_size is divided among the *query* heads",
    ),
    (_head_dim_64, "a head is not 64 numbers wide in every model"),
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
            "2 * layers * KV heads * head_dim * bytes per value.",
        ),
        wrong=(
            (_without_grouped_queries, "hidden_size does not count them"),
            (_query_heads, "count the KV heads"),
            (_head_dim_by_division, "Qwen3-32B in fp16: .* states a head_dim"),
            (_divided_by_kv_heads, "Qwen2.5-7B in fp16: .* among the"),
            (_head_dim_64, "Llama-2-7B in fp16: .* not 64 numbers wide"),
            (_always_64, "not 64 numbers wide"),
            (_always_bf16, "float32: .* not always 2"),
            (_only_keys, "K and V are both kept"),
            (_one_layer, "one layer's share"),
            (_in_kib, "in KiB"),
            (_in_bits, "in bits"),
            (_needs_head_dim, "KeyError: 'head_dim'"),
            (lambda config, size: None, "is None: does a `return` lack"),
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
        title="What is left to reuse",
        minutes=10,
        difficulty=2,
        kind="build",
        roles=("backend", "cache and storage", "solutions"),
        check=_check_reusable,
        hints=(
            "Token i gets its KV when token i is an input of the model. When is the last sampled "
            "token an input?",
            "prompt + output - 1 tokens have KV. Now put them into blocks.",
            "Round down to a multiple of the block size: n // block * block.",
        ),
        wrong=(
            *((formula, reason[:20]) for formula, reason in _REUSE_MISTAKES),
            (lambda p, o, b: 128, "how many full blocks"),
            (lambda p, o, b: float("nan"), "no number that could be"),
            (128, "pass the function itself"),
        ),
        right=(lambda prompt, output, block: np.floor((prompt + output - 1) / block) * block,),
    ),
)
