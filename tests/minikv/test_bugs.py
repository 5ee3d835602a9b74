"""Bugs that engines of this kind have had, one small test each.

Most were found in public engines after the code had long "worked": an error in the cache changes a
few tokens in a few requests, and nothing crashes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minikv import LLM, SamplingParams, blocks
from minikv.attention import PagedBatch, Segment
from minikv.blocks import KVCacheManager, extend_hashes
from minikv.request import Request
from minikv.scheduler import Scheduler


@pytest.fixture
def llm(folder):
    """llm(**options): a small engine in float32 with blocks of 4 tokens."""

    def make(**options):
        return LLM(folder("llama"), dtype="float32", device="cpu", **{"block_size": 4, **options})

    return make


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def prompt(length, first=1):
    return [(first + 7 * i) % 300 for i in range(length)]


def scheduler(num_blocks, block_size, *requests, budget=2048):
    made = Scheduler(
        KVCacheManager(num_blocks, block_size), max_model_len=10_000, max_num_batched_tokens=budget
    )
    for request in requests:
        made.add(request)
    return made


def request(name, tokens, max_tokens=1):
    return Request(request_id=name, token_ids=list(tokens), params=greedy(max_tokens))


def step(sched):
    """Schedule, and pretend that the model answers token 9. Returns tokens given, by request."""
    out = sched.schedule()
    tokens = {s.request.request_id: 9 for s in out.scheduled if s.samples}
    sched.update(out, tokens, dict.fromkeys(tokens, 0.0))
    return {s.request.request_id: s.num_tokens for s in out.scheduled}


def test_an_evicted_block_is_not_found():
    """The hash outlived the content of the only block."""
    kv = KVCacheManager(num_blocks=2, block_size=4)
    hashes = {}
    for name, first in (("x", 1), ("y", 100)):
        hashes[name] = []
        extend_hashes(hashes[name], prompt(4, first), 4)
        kv.allocate(name, 4)
        kv.publish(name, hashes[name], 4)
        kv.release(name, 4)
    assert kv.match(hashes["x"], num_tokens=5) == []
    assert len(kv.match(hashes["y"], num_tokens=5)) == 1


def test_a_prompt_that_is_all_cached_still_computes_a_token(llm):
    """With nothing to compute there are no logits, and kernels fail on a query of length 0."""
    engine = llm()
    first, second = (engine.generate(prompt(8), greedy(3))[0] for _ in range(2))
    assert second.cached_tokens == 4
    assert second.token_ids == first.token_ids
    assert second.logprobs == pytest.approx(first.logprobs, abs=1e-5)


def test_what_is_cached_is_subtracted_before_the_budget_is_spent():
    """465 tokens, the first block of 256 is cached: 209 are computed, after a preemption too."""
    tokens = range(1000, 1465)
    sched = scheduler(4, 256, request("x", tokens[:257]), budget=400)
    step(sched)
    sched.add(request("a", range(256), max_tokens=2))
    b = request("b", tokens)
    sched.add(b)
    assert step(sched) == {"a": 256, "b": 400 - 256}
    assert step(sched) == {"a": 1}  # needs a second block: "b" is preempted
    assert b.num_preemptions == 1
    assert step(sched) == {"b": 209}
    assert b.num_cached_tokens == 256

    sched = scheduler(4, 256, request("x", tokens[:257]))
    step(sched)
    sched.add(request("b", tokens))
    assert step(sched) == {"b": 209}


def test_a_preempted_request_keeps_the_token_it_had_just_got(llm):
    """Two prompts of 4 in 3 blocks of 4: at length 5 each needs another block, one is free."""
    prompts = [prompt(4), prompt(4, first=50)]
    alone = [llm().generate(p, greedy(6))[0].token_ids for p in prompts]
    engine = llm(num_blocks=4, prefix_cache=None)
    outputs = engine.generate(prompts, greedy(6))
    assert [o.num_preemptions for o in outputs] == [0, 1]
    assert engine.trace[1].preempted == (outputs[1].request_id,)
    assert [o.token_ids for o in outputs] == alone


def test_what_cannot_fit_is_refused_at_once(llm):
    """2 blocks of 4 hold 8 tokens: a prompt of 8 would wait for ever for a place for its output."""
    engine = llm(num_blocks=3)
    for length in (8, 20):
        with pytest.raises(ValueError, match=f"the prompt has {length} tokens.*max_model_len=8"):
            engine.generate(prompt(length), greedy(4))
    assert not engine.has_unfinished()
    (output,) = engine.generate(prompt(7), greedy(4))
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_equal_prompts_in_one_step(llm):
    """The second may only hit what the step computes before it is read."""
    alone = llm().generate(prompt(10), greedy(5))[0]
    outputs = llm().generate([prompt(10)] * 3, greedy(5))
    assert [o.cached_tokens for o in outputs] == [0, 8, 8]
    for output in outputs:
        assert output.token_ids == alone.token_ids
        assert output.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_running_request_gets_a_token_in_every_step():
    """Prompts that keep arriving must not stop the one that is decoding."""
    running = request("running", prompt(4), max_tokens=60)
    sched = scheduler(500, 4, running, budget=16)
    step(sched)
    for i in range(10):
        sched.add(request(f"r{i}", range(1000 * i, 1000 * i + 64)))
    steps = 1
    while len(sched.running) + len(sched.waiting) > 1:
        step(sched)
        steps += 1
        assert len(running.output_token_ids) == steps
    assert steps == 1 + 43  # 640 tokens, 15 a step


def test_only_what_is_equal_is_shared(llm):
    """Blocks of one token: two equal prompts share all but the last, a third prompt none."""
    engine = llm(block_size=1)
    engine.generate([prompt(10), prompt(10), prompt(10, first=99)], greedy(1))
    one, two, three = (set(table) for table in engine.trace[0].blocks.values())
    assert (len(one), len(two), len(three)) == (10, 10, 10)
    assert len(one & two) == 9
    assert not three & (one | two)


def test_slots_follow_the_block_table(llm):
    """Blocks come back in any order after an eviction: each is its own 4 slots, none overlaps."""
    cache = llm(num_blocks=8).runner.cache
    batch = PagedBatch(cache, [Segment(2, 7, [5, 2]), Segment(0, 4, [3])])
    assert [table.tolist() for table in batch.tables] == [[5, 2], [3]]
    assert batch.writes.tolist() == [22, 23, 8, 9, 10, 12, 13, 14, 15]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3]


def test_a_hit_that_had_to_wait_is_looked_up_again(llm):
    """A's first blocks are cached, but A does not fit yet; meanwhile B grows over them."""
    engine = llm(num_blocks=7)
    engine.generate(prompt(9), greedy(1))
    b = engine.add_request(prompt(12, first=200), greedy(12))
    a = engine.add_request(prompt(16), greedy(4))
    outputs = {}
    while engine.has_unfinished():
        outputs |= {o.request_id: o for o in engine.step()}
    assert all(a not in step.cached for step in list(engine.trace)[1:13])  # A waited for B
    assert outputs[a].cached_tokens == 0
    assert outputs[a].token_ids == llm().generate(prompt(16), greedy(4))[0].token_ids
    assert outputs[b].token_ids == llm().generate(prompt(12, first=200), greedy(12))[0].token_ids


def test_preemptions_are_bounded():
    """The long one is not let in again for a chunk that the pool has room for, only as a whole."""
    grows, long = request("grows", prompt(4), 60), request("long", prompt(40, first=90), 30)
    sched = scheduler(21, 4, grows, long, budget=8)
    while sched.has_unfinished:
        step(sched)
    assert (grows.num_preemptions, long.num_preemptions) == (0, 1)


def test_keys_are_equal_in_all_processes():
    """Python's own hash() differs from process to process: a shared cache would never hit."""
    program = (
        "import blocks; keys = []; blocks.extend_hashes(keys, range(8), 4, salt='s'); "
        "print([key.hex() for key in keys])"
    )
    said = set()
    for seed in ("1", "2", "random"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(blocks.__file__).parent)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        said.add(done.stdout)
    keys = []
    extend_hashes(keys, range(8), 4, salt="s")
    assert said == {f"{[key.hex() for key in keys]}\n"}


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 6}])
def test_max_tokens_6_gives_6(llm, options):
    engine = llm(**options)
    outputs = engine.generate([prompt(n, first=n) for n in (1, 7, 8, 9)], greedy(6))
    assert [len(o.token_ids) for o in outputs] == [6, 6, 6, 6]
    assert [len(o.logprobs) for o in outputs] == [6, 6, 6, 6]
    assert {o.finish_reason for o in outputs} == {"length"}


def test_a_chunk_reads_up_to_its_own_end(llm):
    """Third chunk of 256 of a prompt of 1,000: 256 queries over 768 keys, not over 1,000."""
    cache = llm(num_blocks=300).runner.cache
    batch = PagedBatch(cache, [Segment(512, 768, list(range(1, 251)))])
    assert batch.lengths == [256]
    assert (batch.ends, [len(table) for table in batch.tables]) == ([768], [192])
    assert batch.masks[0].shape == (256, 768)
    assert batch.masks[0].sum(-1).tolist() == list(range(513, 769))


def test_a_mask_for_few_queries_ends_at_the_last_key(llm):
    """2 queries over 5 keys: aligned to the end. Aligned to the start it would hide the past."""
    batch = PagedBatch(llm(num_blocks=8).runner.cache, [Segment(3, 5, [1, 2])])
    expected = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(batch.masks[0], expected)


def test_an_output_is_reusable_but_for_its_last_token(llm):
    """100 in and 50 out leave the KV of 149 tokens: the last was chosen, never fed in."""
    engine = llm(block_size=1)
    first = engine.generate(prompt(100), greedy(50))[0]
    follow_up = first.prompt_token_ids + first.token_ids + prompt(10)
    assert engine.generate(follow_up, greedy(1))[0].cached_tokens == 149
