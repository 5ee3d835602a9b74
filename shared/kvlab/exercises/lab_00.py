"""Lab 00, one request: what it costs, and what its KV is."""

from __future__ import annotations

from typing import Any

from kvlab.check import Exercise, Wrong


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Wrong(f"{what} should be a number, and is a {type(value).__name__}")
    return value


# 00.1 -----------------------------------------------------------------------


def _check_forwards(answer: Any) -> str:
    if not isinstance(answer, dict) or set(answer) != {"without cache", "with cache"}:
        raise Wrong('keep the two keys "without cache" and "with cache"')
    without = _number(answer["without cache"], '"without cache"')
    with_cache = _number(answer["with cache"], '"with cache"')
    if with_cache == 120:
        raise Wrong(
            "with cache: one too many. The last sampled token is returned to the user and never "
            "goes through the model"
        )
    if with_cache != 119:
        raise Wrong(
            "with cache: every token goes through the model once, when it is an input. Which "
            "tokens of the 100 + 20 are ever an input?"
        )
    if without == 2210:
        raise Wrong("without cache: you counted lengths 101 to 120; the first pass has 100 tokens")
    if without == 2000:
        raise Wrong("without cache: the sequence grows by one token after each pass")
    if without != 2190:
        raise Wrong(
            "without cache: 20 passes, and each one runs the whole sequence so far. How long is "
            "it at the first pass, and at the last?"
        )
    return "100 + 101 + ... + 119 = 2,190 against 100 + 19 = 119, for the same 20 tokens."


# 00.2 -----------------------------------------------------------------------

# Shapes from the models' own config.json files; `expected` is
# 2 (K and V) x layers x KV heads x head_dim x bytes per value.
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
_KV_CASES: tuple[tuple[str, dict[str, int], int, int], ...] = (
    (
        "SmolLM2-135M in bf16",
        _SMOLLM2_135M,
        2,
        23_040,
    ),
    (
        "SmolLM2-135M in float32",
        _SMOLLM2_135M,
        4,
        46_080,
    ),
    (
        "Llama-2-7B in fp16",
        _LLAMA_2_7B,
        2,
        524_288,
    ),
    (
        "Qwen3-32B in fp16",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        2,
        262_144,
    ),
    (
        "Qwen2.5-7B in fp16",
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        2,
        57_344,
    ),
)


def _check_kv_bytes(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function kv_bytes_per_token and pass the function itself")
    for name, config, bytes_per_value, expected in _KV_CASES:
        got = _number(answer(dict(config), bytes_per_value), f"the result for {name}")
        if got == expected:
            continue
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        if got == _without_grouped_queries(config, bytes_per_value):
            reason = "query heads share K and V (grouped-query attention): count the KV heads"
        elif got == _head_dim_by_division(config, bytes_per_value):
            reason = f"its config states a head_dim, which is not hidden_size / {heads} heads"
        elif got == _always_bf16(config, 2):
            reason = "the bytes per value are passed in; they are not always 2"
        elif got * 2 == expected:
            reason = "half of what it should be. K and V are both kept"
        elif got * layers == expected:
            reason = "that is one layer's share"
        elif got * 1024 == expected:
            reason = "that is in KiB; the exercise asks for bytes"
        else:
            reason = "how many vectors does a token leave behind, and how long is each?"
        raise Wrong(f"{name}: {got:,.0f} bytes is not right. {reason[0].upper()}{reason[1:]}")
    return "For a 7B model without grouped-query attention it is half a MiB for every token."


def _without_grouped_queries(config: dict[str, int], size: int) -> int:
    return 2 * config["num_hidden_layers"] * config["hidden_size"] * size


def _head_dim_by_division(config: dict[str, int], size: int) -> int:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * size


def _only_keys(config: dict[str, int], size: int) -> int:
    return _right_kv_bytes(config, size) // 2


def _one_layer(config: dict[str, int], size: int) -> int:
    return _right_kv_bytes(config, size) // config["num_hidden_layers"]


def _always_bf16(config: dict[str, int], size: int) -> int:
    return _right_kv_bytes(config, 2)


def _needs_head_dim(config: dict[str, int], size: int) -> int:
    heads = config["num_key_value_heads"]
    return 2 * config["num_hidden_layers"] * heads * config["head_dim"] * size


def _in_kib(config: dict[str, int], size: int) -> float:
    return _right_kv_bytes(config, size) / 1024


def _right_kv_bytes(config: dict[str, int], size: int) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * size


# 00.3 -----------------------------------------------------------------------

# prompt tokens, output tokens, block size, reusable tokens of the finished request
_REUSE_CASES = (
    (100, 50, 32, 128),
    (100, 50, 1, 149),
    (100, 50, 16, 144),
    (100, 29, 32, 128),
    (100, 28, 32, 96),
    (31, 1, 32, 0),
    (32, 1, 32, 32),
    (33, 32, 32, 64),
)


def _check_reusable(answer: Any) -> str:
    if not callable(answer):
        raise Wrong("write the function reusable_tokens and pass the function itself")
    for prompt, output, block, expected in _REUSE_CASES:
        got = _number(answer(prompt, output, block), "the result")
        case = f"{prompt} prompt and {output} output tokens in blocks of {block}"
        if got != expected and got == (prompt + output) // block * block:
            raise Wrong(
                f"{case}: {got} counts KV of a token that was never an input. Which token of the "
                "sequence has not been through the model when the request ends?"
            )
        if got > expected:
            raise Wrong(f"{case}: {got} is too many. Only full blocks can be found again")
        if got < expected:
            raise Wrong(f"{case}: {got} is too few. KV of generated tokens counts as well")
    return "prompt + output - 1 tokens have KV; full blocks of them can be reused."


EXERCISES = (
    Exercise(
        id="00.1",
        title="Count the token-forwards",
        minutes=5,
        difficulty=1,
        kind="predict",
        roles=("backend", "kernel", "cache and storage", "platform/SRE", "solutions"),
        check=_check_forwards,
        hints=(
            "Write down the length of the input of the first three passes, once without and once "
            "with the cache.",
            "With the cache the first pass takes the whole prompt (prefill) and every later pass "
            "takes one token (decode). 20 tokens need 20 passes.",
            "The first pass already yields token 1 of 20. Token 20 is sampled and then we stop.",
        ),
        wrong=(
            {"without cache": 2190, "with cache": 120},
            {"without cache": 2210, "with cache": 119},
            {"without cache": 2000, "with cache": 119},
            {"without cache": 2400, "with cache": 20},
            {"without cache": 119, "with cache": 2190},
            {"without cache": "2190", "with cache": "119"},
            2190,
        ),
    ),
    Exercise(
        id="00.2",
        title="KV bytes per token",
        minutes=10,
        difficulty=1,
        kind="build",
        roles=("backend", "kernel", "cache and storage", "platform/SRE", "solutions"),
        check=_check_kv_bytes,
        hints=(
            "For each layer and each KV head, one token leaves a key vector and a value vector of "
            "head_dim numbers.",
            "config.get('head_dim') is None where a config does not state it.",
            "2 * layers * KV heads * head_dim * bytes per value.",
        ),
        wrong=(
            _without_grouped_queries,
            _head_dim_by_division,
            _only_keys,
            _one_layer,
            _always_bf16,
            _needs_head_dim,
            _in_kib,
            23_040,
        ),
    ),
    Exercise(
        id="00.3",
        title="What is left to reuse",
        minutes=10,
        difficulty=2,
        kind="explain",
        roles=("backend", "cache and storage", "solutions"),
        check=_check_reusable,
        hints=(
            "Token i gets its KV when token i is an *input* of the model. When is the last "
            "sampled token an input?",
            "prompt + output - 1 tokens have KV. Now put them into blocks.",
            "Round down to a multiple of the block size: n // block * block.",
        ),
        wrong=(
            lambda prompt, output, block: (prompt + output) // block * block,
            lambda prompt, output, block: prompt + output - 1,
            lambda prompt, output, block: -(-(prompt + output - 1) // block) * block,
            lambda prompt, output, block: prompt // block * block,
            lambda prompt, output, block: (prompt + output - 2) // block * block,
            lambda prompt, output, block: 128,
            128,
        ),
    ),
)
