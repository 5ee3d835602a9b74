"""One protocol: the same request gives the same answer, whoever serves it."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from engine_help import need, within

from kvlab.engines import minikv, router, sglang, vllm
from kvlab.engines.generating import GeneratingServer
from kvlab.engines.process import System
from kvlab.engines.protocol import Completion, Engine, EngineError, complete

need("vllm", "sglang")

MODEL = "smollm2-135m"
TEXT = "The key-value cache of a language model holds"
TOKENS = list(range(1000, 1200))
# What each counts for these 200 tokens and two new ones, of which the second is never an input.
COUNTED = {
    "MiniKV": ("minikv:token_forwards_total", 201),
    "VLLM": ("vllm:prompt_tokens_total", 200),
    "SGLang": ("sglang:prefill_effective_tokens_total", 200),
}


# Of the module's scope, so that pytest runs all tests of one engine before those of the next.
@pytest.fixture(
    scope="module",
    params=[minikv, vllm, sglang],
    ids=lambda module: module.__name__.split(".")[-1],
)
def started_by(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def engine(started_by: Any, warm: Any) -> Engine:
    engine: Engine = warm(started_by, MODEL)
    return engine


@pytest.fixture(scope="module")
def expected() -> dict[str, Completion]:
    with minikv.start(MODEL) as engine:
        return {
            "text": engine.generate(TEXT, max_tokens=12),
            "tokens": engine.generate(TOKENS, max_tokens=12, ignore_eos=True),
        }


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    # float32, other kernels, other orders of adding.
    assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)
    assert (one.prompt_tokens, one.finish_reason) == (other.prompt_tokens, other.finish_reason)


def test_the_same_tokens(engine: Engine, expected: dict[str, Completion]) -> None:
    same(engine.generate(TEXT, max_tokens=12), expected["text"])
    assert engine.generate(TEXT, max_tokens=12).text == expected["text"].text
    same(engine.generate(TOKENS, max_tokens=12, ignore_eos=True), expected["tokens"])


def test_several_at_once_come_back_in_order(
    engine: Engine, expected: dict[str, Completion]
) -> None:
    prompts = [TOKENS, TOKENS[:50], TOKENS]
    found = engine.generate(prompts, max_tokens=12, ignore_eos=True)
    assert [completion.prompt_tokens for completion in found] == [200, 50, 200]
    same(found[0], expected["tokens"])
    same(found[2], expected["tokens"])
    assert engine.generate([], max_tokens=1) == []


def test_a_stream_gives_what_generate_gives(
    engine: Engine, expected: dict[str, Completion]
) -> None:
    chunks = list(engine.stream(TEXT, max_tokens=12))
    whole = expected["text"]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert (last.finish_reason, last.prompt_tokens) == ("length", whole.prompt_tokens)
    assert last.cached_tokens is not None


def test_the_cache_is_used_salted_and_reset(engine: Engine) -> None:
    first = engine.generate(TOKENS, max_tokens=2)
    again = engine.generate(TOKENS, max_tokens=2)
    assert first.cached_tokens == 0
    assert 160 <= again.cached_tokens < 200
    assert engine.generate(TOKENS, max_tokens=2, cache_salt="x").cached_tokens == 0
    assert engine.generate(TOKENS, max_tokens=2, cache_salt="x").cached_tokens > 0
    assert engine.reset_prefix_cache()
    assert engine.generate(TOKENS, max_tokens=2).cached_tokens == 0


def test_a_salt_is_a_text_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule for all, told before anything is sent: nothing runs here but minikv."""
    monkeypatch.setattr(System, "start", lambda self: self)
    behind, alone = sglang.start("tiny-random"), vllm.start("tiny-random")
    front = router.start([behind])
    with minikv.start("tiny-random") as inside:
        for ask in (
            *(behind.body, behind.generate, alone.body, alone.generate, front.body, front.generate),
            inside.generate,
            lambda *asked, **options: next(inside.stream(*asked, **options)),
        ):
            for salt in ("", 5, b"a", ["a"]):
                with pytest.raises(EngineError, match="A cache_salt is a text that is not empty"):
                    ask([5, 6, 7], cache_salt=salt)
        assert inside.generate([5, 6, 7], cache_salt="a", max_tokens=1).token_ids
    for engine in (behind, alone):
        assert engine.body([5, 6, 7], cache_salt="a")["cache_salt"] == "a"
        assert "cache_salt" not in engine.body([5, 6, 7], cache_salt=None)


def test_options(engine: Engine) -> None:
    whole = engine.generate(TEXT, max_tokens=12)
    word = whole.text.split()[2]
    stopped = engine.generate(TEXT, max_tokens=12, stop=word)
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert stopped.finish_reason == "stop"
    if isinstance(engine, sglang.SGLang):
        with pytest.raises(EngineError, match="heeds a seed only with"):
            engine.generate(TEXT, seed=1)
        return
    drawn = [engine.generate(TEXT, max_tokens=8, temperature=1.5, seed=s) for s in (1, 1, 2, 3)]
    assert drawn[0].token_ids == drawn[1].token_ids
    assert len({tuple(completion.token_ids) for completion in drawn}) > 1


@pytest.mark.parametrize("prompt", [5, None, [], [[]], ["a", 5], {"a": 1}, [10**9]])
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    if prompt == []:
        assert engine.generate(prompt) == []
        return
    with pytest.raises(EngineError):
        engine.generate(prompt, max_tokens=1)
    assert engine.generate(TEXT, max_tokens=1).token_ids  # and it goes on


def test_metrics_count(engine: Engine) -> None:
    name, count = COUNTED[type(engine).__name__]

    def counted() -> float:
        return sum(v for key, v in engine.metrics().items() if key.partition("{")[0] == name)

    before = counted()
    engine.generate(TOKENS, max_tokens=2)
    assert all(isinstance(value, float | int) for value in engine.metrics().values())
    # An engine may count some moments after its answer.
    assert within(30, lambda: counted() - before == count)


def test_stopped_and_started_again() -> None:
    with minikv.start("tiny-random") as engine:
        engine.stop()
        assert not engine.is_alive
        with pytest.raises(EngineError, match=r"restart\(\)"):
            engine.generate([1, 2, 3])
        assert engine.restart().generate([1, 2, 3], max_tokens=1).token_ids
    assert not engine.is_alive


def test_many_prompts_are_asked_at_once_and_the_first_error_ends_it() -> None:
    together, never = threading.Barrier(256), threading.Event()

    def one(prompt: Any) -> Completion:
        if prompt == "wrong":
            raise EngineError("refused")
        if prompt == "silent":
            never.wait()
        elif int(prompt) < 256:
            together.wait(60)
        return Completion(prompt, [], [], 0, 0, "stop")

    many = [str(number) for number in range(300)]
    found = complete(many, one)
    assert isinstance(found, list)
    assert [completion.text for completion in found] == many
    with pytest.raises(EngineError, match="refused"):
        complete(["silent", "wrong", "silent"], one)
    never.set()


def test_conditions_name_what_decides_and_no_place() -> None:
    """Two engines that differ in a connector or a further flag are not the same conditions."""

    class Made(GeneratingServer):
        name = "made"
        model, device = "m", "cpu"
        _package, _environment_name = "vllm", "vllm"

        def __init__(self, *flags: str, extra: tuple[str, ...] = ()) -> None:
            self._flags, self._extra_args = flags, extra

    def told(port: int, folder: str, kind: str = "A") -> str:
        config = {"kv_connector": kind, "master": f"127.0.0.1:{port}", "path": folder}
        return Made("--kv-transfer-config", json.dumps(config)).conditions()["flags"]

    assert told(1234, "/tmp/a") == told(999, "/home/b c")
    assert told(1, "/tmp/a") != told(1, "/tmp/a", kind="B")
    assert Made("--a", "1").conditions() != Made("--a", "1", extra=("--fp8",)).conditions()
    assert re.fullmatch(r"\d+\.\d+\.\d+", Made().conditions()["version"])
