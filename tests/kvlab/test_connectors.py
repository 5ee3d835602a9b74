"""vLLM with its KV elsewhere: hits after a reset, in a fresh process, and on a bad day.

Every case asks the same: a prompt of 401 tokens, 12 full blocks of 32 and 17 tokens more.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cbor2
import pytest
from engine_help import need, within
from lab_06_tables import LINES_4, columns, told

from kvlab.engines import lmcache, mooncake, sglang, vllm, vllm_connectors, vllm_pd
from kvlab.engines.mooncake import Master, Store
from kvlab.engines.process import System
from kvlab.engines.protocol import Completion, EngineError
from kvlab.engines.vllm import VLLM

need("vllm")

PROMPT = [random.Random(1).randrange(10, 250) for _ in range(401)]
FULL = 384
MODEL = "tiny-random"


def ask(engine: VLLM, prompt: list[int] = PROMPT) -> Completion:
    return engine.generate(prompt, max_tokens=8, ignore_eos=True)


def same(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == pytest.approx(
        other.logprobs, abs=1e-4
    )


def after_reset(engine: VLLM, cached: int = FULL) -> Completion:
    """The prompt, again and again with an empty cache of the engine's own, until what it stored
    is found: storing may run behind the answer."""
    found: list[Completion] = []

    def is_found() -> bool:
        assert within(30, engine.reset_prefix_cache)
        found.append(ask(engine))
        return found[-1].cached_tokens == cached

    assert within(60, is_found), [completion.cached_tokens for completion in found]
    return found[-1]


def sources(engine: VLLM) -> dict[str, float]:
    """Prompt tokens by where they came from."""
    head = 'vllm:prompt_tokens_by_source_total{source="'
    return {
        name.removeprefix(head).removesuffix('"}'): value
        for name, value in engine.metrics().items()
        if name.startswith(head)
    }


Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def plain() -> tuple[Completion, Events, Events]:
    """vLLM without a connector: its answer, and its KV events before and after a reset."""
    with vllm.start(MODEL, kv_events=True) as engine:
        first = ask(engine)
        assert ask(engine).cached_tokens == FULL
        before = engine.kv_events()
        assert engine.reset_prefix_cache()
        ask(engine)  # "cleared" is told with the next step
        after = engine.kv_events()
        for wait in (-1, float("nan")):
            with pytest.raises(EngineError, match="number of seconds"):
                engine.kv_events(wait)
        # As if two batches of events had been lost: what came is kept for the next call.
        engine._next_event -= 2
        ask(engine, [20] * 64)
        with pytest.raises(EngineError, match=r"lost.*next call"):
            engine.kv_events()
        (event,) = engine.kv_events()
        assert event["block_hashes"] == block_hashes([20] * 64)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by signal 9"):
            engine.kv_events()
        return first, before, after


@pytest.fixture(scope="module")
def reference(plain: tuple[Completion, Events, Events]) -> Completion:
    """What every connector has to give as well."""
    return plain[0]


def test_vllm_tells_of_the_blocks_of_its_cache(plain: tuple[Completion, Events, Events]) -> None:
    first, before, after = plain
    assert first.cached_tokens == 0
    assert {event["type"] for event in before} == {"BlockStored"}
    hashes = [value for event in before for value in event["block_hashes"]]
    assert hashes == block_hashes(PROMPT)  # and nothing a second time
    assert [token for event in before for token in event["token_ids"]] == PROMPT[:FULL]
    assert after[0]["type"] == "AllBlocksCleared"
    assert [value for event in after[1:] for value in event["block_hashes"]] == hashes


def block_hashes(tokens: list[int], size: int = 32) -> list[bytes]:
    """vLLM's block hashes, from its rule alone (0.32.0, v1/core/kv_cache_utils.py), with
    --prefix-caching-hash-algo sha256_cbor."""

    def digest(value: object) -> bytes:
        return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()

    parent, found = digest("vllm-none-hash"), []
    for start in range(0, len(tokens) - size + 1, size):
        parent = digest((parent, tuple(tokens[start : start + size]), None))
        found.append(parent)
    return found


# What is no connector, told before anything runs.


def test_what_is_no_connector_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(System, "start", lambda self: self)
    cache, master = lmcache.start(chunk_size=96), mooncake.start()
    with pytest.raises(EngineError, match=r"connector=cache\.connector\(\).*LMCache"):
        vllm.start(MODEL, connector=cache)  # type: ignore[arg-type]
    for other in (master, "lmcache", {"kv_connector": "X"}, cache.connector):
        with pytest.raises(EngineError, match="connector is what makes vLLM use a system"):
            vllm.start(MODEL, connector=other)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="chunk_size that is a multiple of 64"):
        vllm.start(MODEL, connector=cache.connector(), block_size=64)
    assert vllm.start(MODEL, connector=cache.connector(), block_size=32)
    with pytest.raises(EngineError, match="block_size is a whole number"):
        vllm.start(MODEL, block_size="32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: lmcache.start(chunk_size=0), "chunk_size is a whole number from 1 on, and not 0"),
        (lambda: lmcache.start(chunk_size="128"), "chunk_size is a whole number"),
        (lambda: lmcache.start(memory_bytes=0.5), "memory_bytes is a whole number"),
        (lambda: lmcache.start(folder=5), "folder is a path, or None"),
        (lambda: _lmcache().connector("engine"), "mode is one of engine_driven, lmcache_driven"),
        (lambda: _lmcache().connector(_lmcache()), "mode is one of"),
        (lambda: vllm_connectors.to_disk(None), "folder is a path"),
        (lambda: vllm_connectors.to_host("64M"), "memory_bytes is a whole number"),
        (lambda: vllm_connectors.to_store("127.0.0.1:1"), r"what mooncake.start\(\) gives"),
        (lambda: vllm_connectors.to_mooncake(None), r"what mooncake.start\(\) gives"),
        (lambda: vllm_connectors.over_nixl("prefill"), "role is kv_producer"),
        (lambda: sglang.start(MODEL, hicache=True), "hicache is a sglang.HiCache"),
        (lambda: sglang.HiCache(ratio="2"), "ratio is a number above 0"),
        (lambda: sglang.HiCache(folder=5), "folder is a path"),
        (lambda: sglang.HiCache(master="127.0.0.1:1"), r"what mooncake.start\(\) gives"),
        (lambda: sglang.HiCache(segment_bytes="64M"), "segment_bytes is a whole number"),
        (lambda: sglang.start(MODEL, page_size="16"), "page_size is a whole number"),
        (lambda: sglang.start(MODEL, disaggregation="both"), "disaggregation is prefill, decode"),
    ],
)
def test_settings_of_the_wrong_kind_are_told_before_a_start(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], object], told: str
) -> None:
    monkeypatch.setattr(System, "start", lambda self: pytest.fail("it was started"))
    with pytest.raises(EngineError, match=told):
        make()


def _lmcache() -> lmcache.LMCache:
    return lmcache.LMCache(chunk_size=128, memory_bytes=1, folder=None, port=None, deadline=1)


# Mooncake Store, through the course's connector and through vLLM's own.


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[Master, Store]]:
    with mooncake.start() as master, master.client(segment_bytes=128 << 20) as client:
        yield master, client


def test_the_courses_connector(store: tuple[Master, Store], reference: Completion) -> None:
    master, _ = store
    connector = vllm_connectors.to_store(master)
    with vllm.start(MODEL, connector=connector) as engine:
        assert same(ask(engine), reference)
        assert sources(engine)["local_compute"] == 401
        assert same(after_reset(engine), reference)
        assert sources(engine)["external_kv_transfer"] == FULL
        # Four blocks in vLLM's own cache, eight more in the store: each to its own place.
        assert within(30, engine.reset_prefix_cache)
        engine.generate(PROMPT[:130], max_tokens=1)
        before = sources(engine)
        assert same(ask(engine), reference)
        gained = {name: value - before[name] for name, value in sources(engine).items()}
        assert gained["local_cache_hit"] == 4 * 32
        assert gained["external_kv_transfer"] == 8 * 32
    keys = master.metrics()["master_key_count"]
    # 409 tokens, of which the last has no KV: 12 full blocks.
    assert keys == 12
    with vllm.start(MODEL, connector=connector) as engine:  # a fresh process
        assert same(ask(engine), reference)
        assert sources(engine)["local_compute"] == 401 - FULL
        assert master.metrics()["master_key_count"] == keys  # nothing twice
        poisoned_then_killed(engine, master, reference)


def poisoned_then_killed(engine: VLLM, master: Master, reference: Completion) -> None:
    """The bytes are used: others give another answer. And nobody there: it is computed."""
    prompt = PROMPT[:-1] + [PROMPT[-1] + 1]  # shares all 12 blocks
    clean = engine.generate(prompt, max_tokens=8, ignore_eos=True)
    with master.client(segment_bytes=128 << 20) as poisoner:
        poisoned(engine, poisoner)
        assert within(30, engine.reset_prefix_cache)
        wrong = engine.generate(prompt, max_tokens=8, ignore_eos=True)
        assert wrong.cached_tokens == FULL
        assert wrong.logprobs != pytest.approx(clean.logprobs, abs=1e-2)
        long = [*prompt, *PROMPT[:250]]  # 20 blocks, of which 12 are to be loaded
        alone = engine.generate(long, max_tokens=8, ignore_eos=True, cache_salt="alone")
        os.kill(poisoner.pid, signal.SIGKILL)  # who holds the blocks now
        for _ in range(2):  # what is filled behind a load that failed must not be kept
            assert within(30, engine.reset_prefix_cache)
            assert same(engine.generate(long, max_tokens=8, ignore_eos=True), alone)
        assert within(30, engine.reset_prefix_cache)
        before = sources(engine)
        survived = engine.generate(prompt, max_tokens=8, ignore_eos=True)
        assert same(survived, clean)
        # Set-up E of lab 06.7: counted as brought, and computed all the same.
        gained = {name: value - before[name] for name, value in sources(engine).items()}
        says = re.search(r"vLLM says computed (\d+), own pool (\d+), brought (\d+)", told("06.7"))
        assert says and [int(n) for n in says.groups()] == [
            gained[name] for name in ("local_compute", "local_cache_hit", "external_kv_transfer")
        ]
        log = engine.log.read_text()
        assert "loaded 0 of 12 blocks" in log
        assert len(re.findall(r"Transfer failed for key: .* with error: -800", log)) >= 12


def poisoned(engine: VLLM, client: Store) -> None:
    """Put other bytes in the place of the prompt's blocks."""
    for block_hash in block_hashes(PROMPT):
        name = f"{engine.model}/torch.float32/32/{block_hash.hex()}"
        size = client.size(name)
        client.remove(name, force=True)
        client.put(name, bytes(size), segment=client.segment)


def test_vllms_own_mooncake_connector(reference: Completion) -> None:
    with mooncake.start() as master, master.client(segment_bytes=128 << 20) as holder:
        connector = vllm_connectors.to_mooncake(master)
        with vllm.start(MODEL, connector=connector) as engine:
            assert same(ask(engine), reference)
            assert same(after_reset(engine), reference)
        with vllm.start(MODEL, connector=connector) as engine:
            assert ask(engine).cached_tokens == FULL
            # The holder is gone, and the master does not know it yet: vLLM tries until it does.
            os.kill(holder.pid, signal.SIGKILL)
            assert within(30, engine.reset_prefix_cache)
            assert same(ask(engine), reference)
            assert "Recovered from KV load failure" in engine.log.read_text()
            assert ask(engine).cached_tokens == FULL


# Host memory, disk, LMCache.


def test_host_memory(reference: Completion) -> None:
    connector = vllm_connectors.to_host(64 << 20)
    with vllm.start(MODEL, connector=connector, num_gpu_blocks_override=33) as engine:
        assert same(ask(engine), reference)
        for salt in range(4):  # push it out of the device's blocks
            engine.generate(PROMPT, max_tokens=1, cache_salt=str(salt))
        again = ask(engine)
        assert again.cached_tokens == FULL
        assert same(again, reference)
        found = engine.metrics()
        assert found['vllm:prompt_tokens_cached_by_source_total{source="host"}'] > 0


def test_disk(tmp_path: Path, reference: Completion) -> None:
    connector = vllm_connectors.to_disk(tmp_path)
    with vllm.start(MODEL, connector=connector) as engine:
        assert same(ask(engine), reference)
        assert same(after_reset(engine), reference)
    assert list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_lmcache(mode, tmp_path: Path, reference: Completion) -> None:
    with lmcache.start(folder=tmp_path) as cache:
        connector = cache.connector(mode)
        with vllm.start(MODEL, connector=connector) as engine:
            assert same(ask(engine), reference)
            assert same(after_reset(engine), reference)
            for name in ("mq_timeout", "heartbeat_interval"):  # of which LMCache's docstring tells
                assert f"lmcache.mp.{name} = 6.0 (overridden" in engine.log.read_text()
            if mode == "engine_driven":
                # A file for each chunk of 128, named by a key that follows from the tokens.
                keys = {key.hex() for key in lmcache.chunk_keys(PROMPT, 128)}
                assert within(30, lambda: keys == {f.stem[-64:] for f in tmp_path.rglob("*.data")})
                # It goes and comes back, which the engine has to notice: L1 is lost, files stay.
                cache.restart()
                assert "entering degraded mode" in engine.log.read_text()
                assert within(60, lambda: "resuming normal" in engine.log.read_text())
                assert same(after_reset(engine), reference)
            cache.stop()
            assert within(30, engine.reset_prefix_cache)
            assert same(ask(engine), reference)  # without it vLLM computes
        with pytest.raises(EngineError, match=r"LMCache .* is stopped"):
            vllm.start(MODEL, connector=connector)
        if mode == "engine_driven":
            with socket.socket() as other:  # takes the port that the connector knew
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", cache.ports["zmq"]))
                other.listen()
                cache.start()
            with vllm.start(MODEL, connector=connector) as engine:
                assert same(after_reset(engine), reference)  # from the files alone
            assert cache.metrics()


# Prefill here, decode there.


def test_prefill_and_decode_apart(reference: Completion) -> None:
    with vllm_pd.start(MODEL) as pair:
        answer = pair.generate(PROMPT, max_tokens=8, ignore_eos=True)
        assert same(answer, reference)
        assert sources(pair.prefill)["local_compute"] == 401
        other = columns("06.4", LINES_4)[3]  # D
        assert sources(pair.decode)["local_compute"] == other["computed"]
        assert sources(pair.decode)["local_cache_hit"] == other["own pool"]
        assert sources(pair.decode)["external_kv_transfer"] == other["brought"] == 401
        # 13 blocks of 32 tokens, 4,096 bytes each.
        assert pair.decode.metrics()["vllm:nixl_bytes_transferred_sum"] == other["bytes"]
        assert other["bytes"] == 13 * 32 * 4096
        streamed = list(pair.stream(PROMPT, max_tokens=8, ignore_eos=True))
        assert [token for chunk in streamed for token in chunk.token_ids] == reference.token_ids
        several = pair.generate([PROMPT, PROMPT[:100]], max_tokens=8, ignore_eos=True)
        assert same(several[0], reference)
        os.kill(pair.prefill.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by signal 9"):
            pair.generate(PROMPT, max_tokens=8)
    assert not pair.is_alive
