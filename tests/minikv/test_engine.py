"""The loop from outside: counting what a request costs, watching steps, and ending early."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from minikv import LLM, RequestOutput, SamplingParams
from minikv.engine import Stats

PROMPT = [(3 + 7 * i) % 300 for i in range(100)]


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture
def engine(folder):
    """engine(**options): a small engine in float32 with blocks of 4 tokens."""

    def make(**options):
        return LLM(folder("llama"), dtype="float32", device="cpu", **{"block_size": 4, **options})

    return make


def is_idle(llm):
    pool = llm.scheduler.kv.pool
    return not llm.has_unfinished() and pool.num_free == pool.num_blocks - 1


# ---- what it costs -------------------------------------------------------------------------------


def test_token_forwards_with_and_without_the_cache(engine):
    """100 tokens in, 20 out: 119 go through the model; 2,190 if nothing is remembered."""
    llm = engine()
    output = llm.generate(PROMPT, greedy(20))[0]
    read = sum(-(-tokens // 4) * 4 for tokens in range(100, 120))  # whole blocks
    assert llm.stats == Stats(
        steps=20,
        token_forwards=119,
        prefill_tokens=100,
        decode_tokens=19,
        prefix_cache_queries=100,
        copied_bytes=read * llm.kv_bytes_per_token,
        peak_blocks=30,  # 119 tokens in blocks of 4
    )
    llm.stats.reset()
    assert llm.stats == Stats()
    tokens = list(PROMPT)
    for _ in range(20):
        tokens.append(int(llm.forward(tokens)[-1].argmax()))
    assert tokens[100:] == output.token_ids
    assert llm.stats == Stats(token_forwards=2190)


def test_hits_are_not_computed_again(engine):
    llm = engine()
    llm.generate(PROMPT, greedy(1))
    llm.stats.reset()
    llm.generate(PROMPT, greedy(1))
    assert (llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits) == (100, 96)
    assert llm.stats.token_forwards == 4


def test_a_preempted_request_is_looked_up_once(engine):
    """When it is admitted again it finds its own blocks: no hit of the prefix cache, as vLLM
    counts (vllm #25780), nor what the client is told."""
    prompts = [PROMPT[:16], PROMPT[20:36], PROMPT[40:56]]
    poor = engine(num_blocks=14)
    outputs = poor.generate(prompts, greedy(20))
    assert poor.stats.preemptions > 0
    again = [step.cached for step in poor.trace if step.cached][1:]
    assert any(found > 0 for cached in again for found in cached.values())
    assert [output.cached_tokens for output in outputs] == [0, 0, 0]
    assert (poor.stats.prefix_cache_queries, poor.stats.prefix_cache_hits) == (48, 0)
    assert poor.stats.peak_blocks == 12
    poor.generate([1, 2], greedy(1))
    assert poor.stats.peak_blocks == 12


def test_preemption_costs_computation(engine):
    prompts = [PROMPT[:16], PROMPT[20:36], PROMPT[40:56]]
    rich, poor = engine(), engine(num_blocks=14, prefix_cache=None)
    assert [o.token_ids for o in rich.generate(prompts, greedy(20))] == [
        o.token_ids for o in poor.generate(prompts, greedy(20))
    ]
    assert rich.stats.token_forwards == 3 * (16 + 19)
    assert rich.stats.preemptions == 0
    assert poor.stats.preemptions > 0
    assert poor.stats.token_forwards > rich.stats.token_forwards
    assert poor.stats.peak_blocks <= 13


@pytest.mark.parametrize(("kind", "head_dim"), [("llama", 16), ("qwen3", 32)])
def test_kv_bytes(folder, kind, head_dim):
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        llm = LLM(folder(kind), dtype=dtype, device="cpu", kv_cache_memory_bytes=1_000_000)
        assert llm.kv_bytes_per_token == 2 * 2 * 2 * head_dim * size  # K and V, layers, heads
        cache = llm.runner.cache
        held = sum(tensor.nbytes for tensor in cache.k + cache.v)
        assert held == llm.scheduler.kv.pool.num_blocks * 32 * llm.kv_bytes_per_token
        assert 0 <= 1_000_000 - held < 32 * llm.kv_bytes_per_token


# ---- what can be watched -------------------------------------------------------------------------


def test_trace(engine):
    """Budget 8: a prompt of 10 in two chunks, with a second request behind it."""
    llm = engine(max_num_batched_tokens=8)
    llm.generate([PROMPT[:10], PROMPT[50:53]], greedy(2))
    first, second, third = llm.trace
    assert (first.index, first.prefill, first.decode) == (0, {"0": 8}, {})
    assert (first.cached, first.waiting) == ({"0": 0}, ("1",))
    assert (second.prefill, second.decode, second.cached) == ({"0": 2, "1": 3}, {}, {"1": 0})
    assert (third.prefill, third.decode) == ({}, {"0": 1, "1": 1})
    assert first.blocks == {"0": (1, 2)}
    assert third.blocks == {"0": (1, 2, 3), "1": (4,)}
    assert third.free_blocks == llm.scheduler.kv.pool.num_blocks - 1 - 4
    assert all(step.preempted == () for step in llm.trace)
    json.dumps([dataclasses.asdict(step) for step in llm.trace])  # plain data


def test_step_by_step(engine):
    llm = engine()
    expected = engine().generate([PROMPT[:5], PROMPT[5:8]], [greedy(3), greedy(2)])
    a, b = llm.add_request(PROMPT[:5], greedy(3)), llm.add_request(PROMPT[5:8], greedy(2))
    lengths, last = [], {}
    while llm.has_unfinished():
        told = llm.step()
        assert all(isinstance(output, RequestOutput) for output in told)
        lengths.append({o.request_id: (len(o.token_ids), o.finish_reason) for o in told})
        last |= {o.request_id: o for o in told}
    assert lengths == [
        {a: (1, None), b: (1, None)},
        {a: (2, None), b: (2, "length")},
        {a: (3, "length")},
    ]
    assert [last[i].token_ids for i in (a, b)] == [o.token_ids for o in expected]
    assert llm.step() == []
    assert is_idle(llm)


def test_generate_does_not_swallow_what_step_has_to_tell(engine):
    llm = engine()
    mine = llm.add_request(PROMPT[:5], greedy(2))
    llm.generate(PROMPT[10:20], greedy(4))
    (output,) = llm.step()
    assert (output.request_id, output.finish_reason) == (mine, "length")


def test_outputs_come_in_the_order_of_the_prompts(engine):
    llm = engine(scheduling_policy="priority", max_num_seqs=1)
    prompts = [PROMPT[i : i + 9] for i in range(4)]
    outputs = llm.generate(prompts, greedy(2), priority=[3, 1, 2, 0])
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [next(iter(step.cached)) for step in llm.trace if step.cached] == ["3", "1", "2", "0"]


def test_a_salt_keeps_caches_apart(engine):
    llm = engine()

    def hit(salt):
        return llm.generate(PROMPT[:21], greedy(1), cache_salt=salt)[0].cached_tokens

    assert [hit(salt) for salt in ("one", "two", None)] == [0, 0, 0]
    assert [hit(salt) for salt in ("one", "two", None)] == [20, 20, 20]


# ---- early ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort(engine, steps):
    """While it waits, between two chunks, and while it decodes; the other is not disturbed."""
    llm = engine(max_num_batched_tokens=12)
    expected = engine().generate(PROMPT[:6], greedy(5))[0]
    victim = llm.add_request(PROMPT[50:70], greedy(9))
    other = llm.add_request(PROMPT[:6], greedy(5))
    outputs = {}
    for _ in range(steps):
        outputs |= {o.request_id: o for o in llm.step()}
    llm.abort(victim)
    llm.abort(victim)
    llm.abort("no such request")
    while llm.has_unfinished():
        outputs |= {o.request_id: o for o in llm.step()}
    assert outputs[victim].finish_reason == "abort"
    assert len(outputs[victim].token_ids) == max(0, steps - 1)  # its prompt takes two steps
    assert outputs[other].token_ids == expected.token_ids
    assert is_idle(llm)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_that_fails_leaves_no_half_written_blocks(engine, monkeypatch, error, layer):
    """Ctrl-C in the middle of the model: blocks were published for this step, their content was
    not computed in all layers. The next call must not hit them."""
    llm = engine(max_num_batched_tokens=16)
    expected = engine().generate(PROMPT[:40], greedy(4))[0]
    module = llm.runner.model.model.layers[layer].mlp
    calls = 0

    def fail_in_the_second_chunk(x):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        return type(module).forward(module, x)

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", fail_in_the_second_chunk)
        with pytest.raises(type(error)):
            llm.generate([PROMPT[:40], PROMPT[60:70]], greedy(4))
    assert is_idle(llm)
    output = llm.generate(PROMPT[:40], greedy(4))[0]
    assert output.cached_tokens == 16  # the first chunk
    assert output.token_ids == expected.token_ids
    assert output.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_step_that_fails_ends_its_requests_and_no_others(engine, monkeypatch):
    llm = engine(max_num_seqs=1)
    first, second = (llm.add_request(PROMPT[i : i + 9], greedy(2)) for i in (0, 20))
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "execute", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    outputs = llm.step() + llm.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        (first, "abort"),
        (second, None),
        (second, "length"),
    ]
    assert is_idle(llm)


@pytest.mark.parametrize("place", ["update", "text"])
def test_a_step_that_fails_after_the_model_ran(engine, monkeypatch, place):
    """The tokens are there, but half of the requests have not been told of them."""
    llm = engine(max_num_seqs=2)
    ids = [llm.add_request(PROMPT[i : i + 9], greedy(n)) for i, n in ((0, 1), (20, 3), (40, 1))]
    second = llm._clients[ids[1]]
    with monkeypatch.context() as patch:
        if place == "update":
            check = llm.scheduler._check_stop
            patch.setattr(
                llm.scheduler, "_check_stop", lambda r: 1 / 0 if r is second.request else check(r)
            )
        else:
            patch.setattr(second.detokenizer, "append", lambda token: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.step()
    ended = {o.request_id: o.finish_reason for o in llm.step()}
    # The first has had its whole turn only where its text was made before the second's failed.
    assert ended == {
        ids[0]: "abort" if place == "update" else "length",
        ids[1]: "abort",
        ids[2]: "length",
    }
    assert is_idle(llm)
    assert not llm._clients
    assert llm.generate(PROMPT[:9], greedy(1))[0].finish_reason == "length"


def test_preempted_in_the_step_that_had_given_it_tokens(engine):
    """Only under "priority": the victim's blocks were published for a share that is taken back.

    vLLM 0.32.0 leaves their hashes, and the victim then hits 28 tokens of which 24 were computed.
    """
    expected = engine().generate(PROMPT[:32], greedy(2))[0]
    llm = engine(
        num_blocks=11,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        scheduling_policy="priority",
    )
    low = llm.add_request(PROMPT[:32], greedy(2), priority=1)
    outputs = {o.request_id: o for o in llm.step()}
    high = llm.add_request(PROMPT[50:58], greedy(2), priority=0)
    while llm.has_unfinished():
        outputs |= {o.request_id: o for o in llm.step()}
    first, second, third, fourth = list(llm.trace)[:4]
    assert (first.prefill, second.prefill) == ({low: 16}, {low: 8, high: 8})
    # `low` came first and had got 8 more tokens, then `high` found no block for its next one.
    assert (third.prefill, third.decode, third.preempted) == ({}, {high: 1}, (low,))
    assert fourth.cached == {low: 24}
    assert outputs[low].token_ids == expected.token_ids
    assert outputs[low].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_reset_prefix_cache(engine):
    llm = engine()
    llm.generate(PROMPT, greedy(1))
    llm.add_request(PROMPT[:8], greedy(3))
    llm.step()
    assert not llm.reset_prefix_cache()  # a request holds blocks
    while llm.has_unfinished():
        llm.step()
    assert llm.reset_prefix_cache()
    assert llm.generate(PROMPT, greedy(1))[0].cached_tokens == 0


def test_the_context_window_ends_an_output(engine):
    """At most max_model_len tokens of prompt and output; by default what the pool holds."""
    for options, window in (({"max_model_len": 50}, 50), ({"num_blocks": 11}, 40), ({}, 256)):
        llm = engine(**options)
        assert llm.max_model_len == window
        prompt = (PROMPT * 3)[: window - 3]
        output = llm.generate(prompt, greedy(99))[0]
        assert (len(output.token_ids), output.finish_reason) == (3, "length")
        assert is_idle(llm)


def test_engine_leaves_no_gradients_and_no_training_mode(engine):
    llm = engine()
    model = llm.runner.model
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.num_weights > sum(parameter.numel() for parameter in model.parameters())
    assert not llm.forward([1, 2, 3]).requires_grad
    assert torch.is_grad_enabled()
