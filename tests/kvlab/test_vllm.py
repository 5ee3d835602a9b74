"""The real vLLM: what it counts, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest
from engine_help import need, within

from kvlab import environments, models, supervisor
from kvlab.engines import vllm
from kvlab.engines.protocol import Completion, EngineError
from kvlab.engines.vllm import VLLM
from kvlab.paths import ROOT

need("vllm")

BLOCK = 32


@pytest.fixture
def engine(warm: Any) -> VLLM:
    """The one warm server, with an empty prefix cache."""
    running: VLLM = warm(vllm, "smollm2-135m")
    return running


def prompt(length: int, start: int = 1000) -> list[int]:
    return list(range(start, start + length))


# What it gives back.


def test_a_known_answer(engine: VLLM) -> None:
    completion = engine.generate("The capital of France is", max_tokens=8)
    assert completion.text.startswith(" Paris")
    assert len(completion.token_ids) == len(completion.logprobs) == 8
    assert completion.prompt_tokens == 5
    assert completion.finish_reason == "length"
    assert all(-20 < logprob <= 0 for logprob in completion.logprobs)
    assert max(completion.logprobs) < 0


@pytest.mark.parametrize("length", [31, 32, 33, 96, 97, 200])
def test_the_second_time_whole_blocks_are_cached(engine: VLLM, length: int) -> None:
    before = engine.counters()
    first = engine.generate(prompt(length), max_tokens=2)
    second = engine.generate(prompt(length), max_tokens=2)
    # The last token is always computed, for its logits are what is asked for.
    expected = (length - 1) // BLOCK * BLOCK
    assert (first.cached_tokens, second.cached_tokens) == (0, expected)
    assert second.token_ids == first.token_ids
    assert second.logprobs == pytest.approx(first.logprobs, abs=1e-4)
    after = engine.counters()
    assert after.prefix_queries - before.prefix_queries == 2 * length
    assert after.prefix_hits - before.prefix_hits == expected
    assert after.prompt_tokens - before.prompt_tokens == 2 * length
    assert after.generation_tokens - before.generation_tokens == 4
    assert (after.running, after.waiting) == (0, 0)


def test_a_stream_gives_what_generate_gives(engine: VLLM) -> None:
    text = "Once upon a time"
    whole = engine.generate(text, max_tokens=12)
    chunks = list(engine.stream(text, max_tokens=12))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 12 + [0]  # the end brings none
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 12 + ["length"]
    assert (chunks[-1].prompt_tokens, chunks[-1].cached_tokens) == (whole.prompt_tokens, 0)


def test_without_log_probabilities(engine: VLLM) -> None:
    answer = engine.generate([5, 6, 7], max_tokens=3, ignore_eos=True, logprobs=False)
    assert len(answer.token_ids) == 3
    assert answer.logprobs == []


def test_a_stream_that_is_closed_early_is_aborted(engine: VLLM) -> None:
    before = engine.counters()
    stream = engine.stream("Count:", max_tokens=900, ignore_eos=True)
    taken = list(itertools.islice(stream, 3))
    assert len(taken) == 3
    assert engine.counters().running == 1
    stream.close()
    assert within(60, lambda: engine.counters().running == 0)
    # Its blocks are free again: only then can the cache be reset.
    assert engine.reset_prefix_cache()
    assert 3 <= engine.counters().generation_tokens - before.generation_tokens < 900


def test_only_who_knows_the_token_may_change_anything(engine: VLLM) -> None:
    """Every web page that this machine shows could reach the port."""
    for path in ("/reset_prefix_cache", "/sleep", "/v1/completions", "/collective_rpc"):
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Content-Type": "text/plain"}):
            answer = httpx.post(engine.url + path, headers=headers, content=b"{}", trust_env=False)
            assert answer.status_code == 401, (path, answer.text)
    assert httpx.get(engine.url + "/metrics", trust_env=False).status_code == 200


@pytest.mark.parametrize("asked", [None, 5, {"text": "a"}, b"a", [None], [["a"]], [1.5], [[1], 2]])
def test_what_is_no_prompt_is_refused(engine: VLLM, asked: Any) -> None:
    with pytest.raises(EngineError, match="A prompt is a text or a list of token ids"):
        engine.generate(asked)
    with pytest.raises(EngineError):
        next(engine.stream(asked))


def test_one_stop_string_is_one(engine: VLLM) -> None:
    whole = engine.generate("Count: one two three", max_tokens=20, ignore_eos=True).text
    stop = whole[4:9]
    assert engine.generate("Count: one two three", max_tokens=20, stop=stop).text == whole[:4]
    with pytest.raises(EngineError, match="stream\\(\\) takes one prompt"):
        next(engine.stream(["a", "b"]))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="cannot be asked that"):
        engine.generate("a", temperature=math.nan)
    with pytest.raises(EngineError, match="the prompt alone fills max_model_len"):
        engine.generate(prompt(1024))


def test_a_salt_isolates(engine: VLLM) -> None:
    def cached(salt: str | None) -> int:
        return engine.generate(prompt(100), max_tokens=1, cache_salt=salt).cached_tokens

    assert [cached(None), cached(None)] == [0, 96]
    assert [cached("a"), cached("a")] == [0, 96]
    assert [cached("b"), cached(None)] == [0, 96]


def test_reset_forgets_unless_blocks_are_held(engine: VLLM) -> None:
    assert engine.generate(prompt(100), max_tokens=1).cached_tokens == 0
    assert engine.generate(prompt(100), max_tokens=1).cached_tokens == 96
    assert engine.reset_prefix_cache() is True
    assert engine.generate(prompt(100), max_tokens=1).cached_tokens == 0
    with contextlib.closing(engine.stream("A", max_tokens=900, ignore_eos=True)) as stream:
        next(stream)
        assert engine.reset_prefix_cache() is False


def test_several_prompts_at_once_keep_their_order(engine: VLLM) -> None:
    prompts = [prompt(length) for length in (5, 40, 9)]
    together = engine.generate(prompts, max_tokens=4)
    assert [completion.prompt_tokens for completion in together] == [5, 40, 9]
    for one, completion in zip(prompts, together, strict=True):
        assert engine.generate(one, max_tokens=4).token_ids == completion.token_ids
    assert engine.generate([], max_tokens=4) == []
    assert isinstance(engine.generate("Hello", max_tokens=1), Completion)
    assert len(engine.generate(["Hello", "Bye"], max_tokens=1)) == 2


def test_preemption_is_counted_and_changes_no_token(engine: VLLM) -> None:
    # 8 x (100 + 100) tokens do not fit into 44 blocks of 32.
    assert engine.num_blocks() == 45
    prompts = [prompt(100, start=1000 + 200 * i) for i in range(8)]
    before = engine.counters()
    together = engine.generate(prompts, max_tokens=100, ignore_eos=True)
    assert engine.counters().preemptions > before.preemptions
    assert [len(completion.token_ids) for completion in together] == [100] * 8
    alone = engine.generate(prompts[-1], max_tokens=100, ignore_eos=True)
    assert alone.token_ids == together[-1].token_ids


def test_sampling(engine: VLLM) -> None:
    def sample(seed: int, temperature: float = 1.5, top_p: float = 1.0) -> list[int]:
        return engine.generate(
            "Once", max_tokens=16, temperature=temperature, top_p=top_p, seed=seed
        ).token_ids

    assert sample(1) == sample(1) != sample(2)
    # The most likely token alone already has more than this share.
    assert sample(1, top_p=1e-6) == sample(2, top_p=1e-6) == sample(3, temperature=0)


def test_stop_string_and_end_of_sequence(engine: VLLM) -> None:
    stopped = engine.generate("The capital of France is", max_tokens=20, stop=["."])
    assert stopped.finish_reason == "stop"
    assert "." not in stopped.text
    asked = "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n"
    assert engine.generate(asked, max_tokens=100).finish_reason == "stop"
    assert engine.generate(asked, max_tokens=100, ignore_eos=True).finish_reason == "length"


def test_metrics_are_numbers_by_name(engine: VLLM) -> None:
    engine.generate("Hello", max_tokens=1)
    found = engine.metrics()
    assert found["vllm:num_requests_running"] == 0
    assert found['vllm:request_success_total{finished_reason="length"}'] >= 1
    assert found["vllm:time_to_first_token_seconds_count"] >= 1
    assert not [name for name in found if "_bucket" in name or "model_name" in name]
    assert all(math.isfinite(value) for value in found.values())


def test_what_it_refuses_it_says(engine: VLLM) -> None:
    with pytest.raises(EngineError, match="maximum context length is 1024"):
        engine.generate(prompt(2000), max_tokens=1)
    with pytest.raises(EngineError, match='scheduling_policy="priority"'):
        engine.generate("Hello", priority=1)
    with pytest.raises(EngineError, match="out of vocabulary"):
        engine.generate([1, 2, 1 << 20])
    with pytest.raises(EngineError, match="maximum context length is 1024"):
        next(engine.stream(prompt(2000)))
    assert engine.generate("Hello", max_tokens=1).finish_reason == "length"


def test_it_listens_on_the_loopback_alone(engine: VLLM) -> None:
    tree = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in tree
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}


def test_a_second_engine_on_its_port_is_refused(engine: VLLM) -> None:
    with pytest.raises(EngineError, match=f"Port {engine.port} is in use"):
        vllm.start("smollm2-135m", port=engine.port)


# What it says before anything is started.


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(models.get("tiny-random"), tmp_path / "model"))


def refusal(model: str | Path, **settings: Any) -> str:
    started = AssertionError("something was started")
    with (
        patch("kvlab.engines.process.Supervised", side_effect=started),
        pytest.raises((EngineError, models.ModelError)) as error,
    ):
        vllm.start(model, **settings)
    return str(error.value)


def test_missing_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    assert str(tmp_path / "nowhere") in refusal(str(tmp_path / "nowhere"))
    with pytest.raises(models.ModelError, match="smollm2-135m"):
        vllm.start("smollm3")


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "other")
    assert "no .safetensors file" in refusal(copy)
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    )
    assert "model-00001-of-00002.safetensors is missing" in refusal(copy)


@pytest.mark.parametrize("kept", [0.0, 1e-6, 0.001, 0.5, 0.999])
def test_truncated_weights(copy: Path, kept: float) -> None:
    weights = copy / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * kept))
    message = refusal(copy)
    assert str(weights) in message
    assert "anew" in message


def test_weights_that_are_no_safetensors(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
    assert "not a whole safetensors file" in refusal(copy)


@pytest.mark.parametrize("header", ["{}", "[]", '{"__metadata__": {}}', '{"a": 1}', '{"a": {}}'])
def test_weights_whose_header_says_nothing(copy: Path, header: str) -> None:
    written = len(header).to_bytes(8, "little") + header.encode()
    (copy / "model.safetensors").write_bytes(written)
    assert "not a whole safetensors file" in refusal(copy)
    (copy / "model.safetensors.index.json").write_text(header)
    assert "model.safetensors.index.json cannot be read" in refusal(copy)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    monkeypatch.setattr(environments, "python", lambda name: Path(sys.executable))
    message = refusal("tiny-random", kv_cache_memory_bytes=1 << 50)
    assert "1048576.0 GiB KV cache" in message
    assert "are free" in message
    # 4 layers x 2 x 2 heads x 64 x 4 bytes x 32 tokens are 131,072 bytes a block.
    message = refusal("tiny-random", num_gpu_blocks_override=1 << 30)
    assert "131072.0 GiB KV cache" in message


# How it fails while starting.


def failure(**settings: Any) -> str:
    with pytest.raises(EngineError) as error:
        vllm.start("tiny-random", **settings)
    log = error.value.log
    assert log is not None
    assert log.exists()
    message = str(error.value)
    assert str(log) in message
    assert len(message) < 2500, message
    run = log.stem.rpartition("-")[2]
    assert supervisor.marked(run) == []
    assert not (models.cache() / "tmp" / run).exists()
    return message


def test_an_unknown_flag() -> None:
    message = failure(extra_args=["--no-such-flag"])
    assert "does not know a flag" in message
    assert "unrecognized arguments: --no-such-flag" in message


def test_a_kv_cache_too_small_for_one_request() -> None:
    message = failure(kv_cache_memory_bytes=1 << 20, max_model_len=1024)
    assert "KV cache is too small" in message
    assert "Traceback" not in message


def test_a_deadline_too_short() -> None:
    assert "not ready after 1 s" in failure(deadline=1)


# How it ends.

STARTER = """
import json, sys, time
from kvlab.engines import vllm
engine = vllm.start("tiny-random")
stream = engine.stream([5, 6, 7], max_tokens=900, ignore_eos=True)
next(stream)
print(engine.port, flush=True)
for chunk in stream:
    time.sleep(0.1)
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["while it starts", "while it streams"])
def test_a_killed_starter_leaves_nothing_of_vllm(when: str) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        env={**os.environ, "PYTHONPATH": str(ROOT / "shared")},
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        port = 0
        try:
            if when == "while it streams":
                assert starter.stdout is not None
                port = int(starter.stdout.readline())
            # Supervisor, API server, resource tracker, engine core: each exists some seconds before
            # vLLM is ready.
            assert within(300, lambda: len(names(starter.pid)) >= 4), names(starter.pid)
            tree = psutil.Process(starter.pid).children(recursive=True)
            (run,) = {process.environ().get(supervisor.MARK) for process in tree} - {None}
            folder = models.cache() / "tmp" / str(run)
            assert folder.exists()
        finally:
            starter.kill()
    assert within(60, lambda: not any(map(runs, tree))), [p for p in tree if runs(p)]
    assert within(60, lambda: not folder.exists())
    if port:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def names(pid: int) -> list[str]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(process.name())
    return found


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_killed_while_streaming() -> None:
    with vllm.start("tiny-random") as engine:
        for victim in ("engine core", "main process"):
            tree = psutil.Process(engine.pid).children(recursive=True)
            core = next(process for process in tree if "EngineCore" in process.name())
            stream = engine.stream([5, 6, 7], max_tokens=900, ignore_eos=True)
            next(stream)
            began = time.monotonic()
            os.kill(engine.pid if victim == "main process" else core.pid, signal.SIGKILL)
            with pytest.raises(EngineError) as error:
                for _ in stream:
                    pass
            assert time.monotonic() - began < 60  # the client itself would wait 600 s
            message = str(error.value)
            assert str(engine.log) in message
            if victim == "main process":
                assert "killed by signal 9" in message
            else:
                assert "EngineCore" in message
            assert within(60, lambda tree=tree: not any(map(runs, tree)))
            with pytest.raises(EngineError, match=r"restart\(\)"):
                engine.generate([5, 6, 7])
            if victim == "engine core":
                engine.restart()
                assert len(engine.generate([5, 6, 7], max_tokens=3).token_ids) == 3
