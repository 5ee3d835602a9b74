"""The real SGLang: its radix tree, HiCache's tiers, its router, and prefill and decode apart."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_help import need, within

from kvlab import measure, supervisor
from kvlab.engines import mooncake, router, sglang, sglang_pd, vllm_pd
from kvlab.engines.process import TOKEN
from kvlab.engines.protocol import EngineError
from kvlab.engines.sglang import HiCache, SGLang, Tiers

need("sglang", "router", "vllm")

MODEL = "tiny-random"
rng = random.Random(1)
PROMPT = [rng.randrange(10, 250) for _ in range(400)]
FILLERS = [[rng.randrange(10, 250) for _ in range(640)] for _ in range(4)]


@pytest.fixture
def engine(warm: Any) -> SGLang:
    running: SGLang = warm(sglang, MODEL)
    return running


@pytest.mark.parametrize("length", [15, 16, 17, 33, 200])
def test_the_second_time_whole_pages_are_cached(engine: SGLang, length: int) -> None:
    prompt = PROMPT[:length]
    assert engine.cached_by_tier(prompt, max_tokens=1) == Tiers(0, 0, 0)
    # The last token is always computed, for its logits are what is asked for.
    expected = (length - 1) // 16 * 16
    assert engine.cached_by_tier(prompt, max_tokens=1) == Tiers(expected, 0, 0)


def test_without_log_probabilities(engine: SGLang) -> None:
    answer = engine.generate(PROMPT[:20], max_tokens=3, ignore_eos=True, logprobs=False)
    assert len(answer.token_ids) == 3
    assert answer.logprobs == []


def test_a_stream_that_is_closed_early_is_aborted(engine: SGLang) -> None:
    stream = engine.stream(PROMPT[:50], max_tokens=900, ignore_eos=True)
    assert next(stream).token_ids
    stream.close()
    assert within(60, engine.reset_prefix_cache)  # it refuses while a request runs


def test_it_changes_something_only_for_who_knows_its_token(engine: SGLang) -> None:
    for method, path in (
        ("POST", "/generate"),
        ("GET", "/flush_cache"),
        ("POST", "/flush_cache"),
        ("GET", "/server_info"),
        ("POST", "/pause_generation"),
    ):
        answer = httpx.request(method, engine.url + path, json={} if method == "POST" else None)
        assert answer.status_code in (401, 403), (path, answer.status_code)
    assert httpx.get(engine.url + "/health").status_code == 200


def test_its_log_can_be_shown(engine: SGLang) -> None:
    assert "api_key" in engine.log.read_text()
    assert TOKEN not in engine.log.read_text()


def test_it_listens_on_loopback_alone(engine: SGLang) -> None:
    listening = {
        connection.laddr.ip
        for process in supervisor.marked(engine._begun.folder.name)
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}


def test_no_way_leads_a_token_outside_the_vocabulary_in_or_no_token(engine: SGLang) -> None:
    """SGLang 0.5.23 would take both, and its scheduler would end."""
    for ask in (engine.generate, engine.wire, lambda prompt: next(engine.stream(prompt))):
        with pytest.raises(EngineError, match="token 1000000 is none of"):
            ask([1, 1_000_000])
        with pytest.raises(EngineError, match="the prompt is empty"):
            ask("")
    assert engine.generate([20, 21], max_tokens=1).token_ids


def test_log_probabilities_are_those_before_the_temperature(engine: SGLang) -> None:
    greedy = engine.generate(PROMPT[:40], max_tokens=1)
    warm = [engine.generate(PROMPT[:40], max_tokens=1, temperature=1.5) for _ in range(8)]
    for found in warm:
        if found.token_ids == greedy.token_ids:
            assert found.logprobs == pytest.approx(greedy.logprobs, abs=1e-3)
    # At another temperature the best token would have a smaller one.
    assert all(found.logprobs[0] <= greedy.logprobs[0] + 1e-3 for found in warm)


def test_an_inner_process_is_killed() -> None:
    with sglang.start(MODEL) as engine:
        inner = psutil.Process(engine.pid).children(recursive=True)
        scheduler = next(p for p in inner if "scheduler" in " ".join(p.cmdline()).lower())
        scheduler.kill()
        with pytest.raises(EngineError):
            for _ in range(100):
                engine.generate(PROMPT, max_tokens=1)
        assert within(30, lambda: not engine.is_alive)


def test_counting_gives_what_lies_between(engine: SGLang) -> None:
    """SGLang counts some moments behind its answers, and its CPU's seconds without a request."""
    with measure.counting(engine) as counted:
        engine.generate(PROMPT, max_tokens=2)
        engine.generate(PROMPT, max_tokens=2)
    assert counted.by_source() == {"input": 400 + 16, "device_hit": 384}
    with measure.counting(engine) as counted:
        pass
    assert counted.changed == {}


# HiCache.


def evicted(engine: SGLang) -> None:
    """Push the prompt out of the device's pool."""
    for filler in FILLERS:
        engine.generate(filler, max_tokens=1)


def tiers_follow_one_another(engine: SGLang) -> None:
    first = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert first.cached_tokens == 0
    assert engine.cached_by_tier(PROMPT) == Tiers(384, 0, 0)
    evicted(engine)
    found = engine.cached_by_tier(PROMPT)
    assert (found.device, found.storage) == (0, 0)
    assert found.host == 384
    found = Tiers(0, 0, 0)

    def in_storage() -> bool:  # it is written behind the answer
        nonlocal found
        assert within(60, engine.reset_prefix_cache)
        found = engine.cached_by_tier(PROMPT)
        return found == Tiers(0, 0, 384)

    assert within(60, in_storage), found
    again = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-3)


def test_device_host_and_files(tmp_path: Path) -> None:
    with sglang.start(MODEL, hicache=HiCache(folder=tmp_path)) as engine:
        tiers_follow_one_another(engine)
    assert len(list(tmp_path.rglob("*"))) >= 24
    with sglang.start(MODEL, hicache=HiCache(folder=tmp_path)) as engine:
        assert engine.cached_by_tier(PROMPT).storage == 384  # a fresh process


def test_device_host_and_mooncake() -> None:
    with mooncake.start() as master:
        with sglang.start(MODEL, hicache=HiCache(master=master)) as engine:
            tiers_follow_one_another(engine)
            assert master.metrics()["master_key_count"] > 0


# The router.


def test_a_router_without_servers_is_refused() -> None:
    with pytest.raises(EngineError, match="needs a server"):
        router.start([])


@pytest.mark.parametrize("start", [sglang_pd.start, vllm_pd.start])
def test_two_servers_get_no_port_between_them(start: Any) -> None:
    with pytest.raises(EngineError, match="share one port"):
        start(MODEL, port=5000)


def test_cache_aware_and_round_robin_differ() -> None:
    with sglang.start(MODEL) as a, sglang.start(MODEL) as b:
        cached = {}
        for policy in ("round_robin", "cache_aware"):
            assert within(60, a.reset_prefix_cache)
            assert within(60, b.reset_prefix_cache)
            with router.start([a, b], policy=policy) as front:
                answers = [front.generate(PROMPT, max_tokens=2) for _ in range(4)]
                cached[policy] = [answer.cached_tokens for answer in answers]
                streamed = list(front.stream(PROMPT, max_tokens=2))
                assert streamed[-1].finish_reason == "length"
                for path in ("/generate", "/v1/completions", "/flush_cache", "/workers"):
                    assert httpx.post(front.url + path, json={}).status_code in (401, 403), path
        assert cached["round_robin"] == [0, 0, 384, 384]
        assert cached["cache_aware"] == [0, 384, 384, 384]
        with router.start([a, b]) as front:
            os.kill(a.pid, signal.SIGKILL)
            # One replica is gone: the other one answers.
            assert within(60, lambda: _answers(front))
            assert front.metrics()
            a.stop()  # what is left of it, its port
            with taken(a.port) as other:
                for ask in (front.generate, front.wire, lambda p: next(front.stream(p))):
                    with pytest.raises(EngineError, match="port that may be another program's"):
                        ask(PROMPT)
                a.start()  # at another port
                with pytest.raises(EngineError, match="port that may be another program's"):
                    front.generate(PROMPT)
                with pytest.raises(BlockingIOError):  # nobody has come to it, with the key or not
                    other.accept()
            assert front.restart().generate(PROMPT, max_tokens=2).token_ids
        a.stop()
        with pytest.raises(EngineError, match="is stopped"):
            router.start([a, b])


@contextlib.contextmanager
def taken(port: int) -> Iterator[socket.socket]:
    """Another program's socket that listens there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        other.setblocking(False)
        yield other


def _answers(front: router.Router) -> bool:
    try:
        return len(front.generate(PROMPT, max_tokens=2).token_ids) == 2
    except EngineError:
        return False


# Prefill and decode apart.

COMPUTED = 'sglang:realtime_tokens_total{mode="prefill_compute"}'


def test_prefill_and_decode_apart(engine: SGLang) -> None:
    alone = engine.generate(PROMPT, max_tokens=8, ignore_eos=True)
    engine.stop()  # three at once are much for a small machine
    with sglang_pd.start(MODEL) as pair:
        answer = pair.generate(PROMPT, max_tokens=8, ignore_eos=True)
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        chunks = list(pair.stream(PROMPT[:40], max_tokens=3, ignore_eos=True))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 3
        assert within(10, lambda: pair.prefill.metrics().get(COMPUTED) == 408)  # 32 are cached
        assert COMPUTED not in pair.decode.metrics()
        with pytest.raises(EngineError, match="cache_salt"):
            pair.generate(PROMPT, cache_salt="s")
        pair.decode.stop()
        assert not pair.is_alive
        with pytest.raises(EngineError):
            pair.front.generate(PROMPT, max_tokens=1)
        with pytest.raises(EngineError, match=r"restart\(\)"):  # at once
            pair.generate(PROMPT, max_tokens=1)
        with taken(pair.decode.port):  # so that it comes back with other ports
            pair.start()
        assert pair.generate(PROMPT, max_tokens=8).token_ids[0] == alone.token_ids[0]
        # The decode side runs on, and holds nothing of the prefill side before against the new one.
        decode = pair.decode.pid
        pair.prefill.restart()
        assert pair.generate(PROMPT[1:], max_tokens=8).cached_tokens == 0
        assert pair.decode.pid == decode
        # More than the decode side's pool of 2,048 tokens: one of three has to wait, and its KV
        # to leave the pool and come back.
        prompts = [PROMPT[:200], PROMPT[:50], PROMPT[3:203]]
        several = pair.generate(prompts, max_tokens=700, ignore_eos=True)
        assert pair.decode.metrics()["sglang:num_retracted_requests_total"] > 0
        for prompt, answer in zip(prompts, several, strict=True):
            one = pair.generate(prompt, max_tokens=700, ignore_eos=True)
            assert answer.token_ids == one.token_ids
    assert not any(part.is_alive for part in (pair.prefill, pair.decode, pair.front))
