"""Questions that people asked in public, with the values that are right: does minikv give them?

Each test names what was reported, and where. Attention's cases stand in test_bugs.py (a mask for
few queries; a chunk that reads too far) and in tests/kernels/test_online.py (merging two halves).
"""

import pytest
import torch
from test_scheduler import PretendModel, first_and_last_step, make, request, step

from minikv import LLM, SamplingParams
from minikv.attention import PagedBatch, Segment
from minikv.model import ModelConfig
from minikv.scheduler import make_kv
from minikv.simulate import Cost, Sent, simulate
from minikv.trace import Arrival, dry_run


def cached(prompts, *, block_size, num_blocks, cache="hash"):
    """Send prompts one after the other; what each finds. No model."""
    scheduler, found = make(num_blocks, block_size, cache=cache, max_num_batched_tokens=10**6), []
    for number, prompt in enumerate(prompts):
        name = str(number)
        scheduler.add(request(name, prompt, max_tokens=1))
        out = scheduler.schedule()
        found.append(out.admitted[name])
        scheduler.update(out, {name: 0}, {name: 0.0})
    return found


# ---- scheduling --------------------------------------------------------------------------------


def test_1_a_short_prompt_behind_a_long_one():
    """vllm #57413: a tiny request waits for a long prompt although prefill is chunked."""
    for threshold, expected in (
        (0, {"long": 8, "short": 8}),
        (64, {"long": 10, "short": 1}),
    ):
        scheduler = make(
            100, 16, cache=None, max_num_batched_tokens=128, long_prefill_token_threshold=threshold
        )
        prompts = [request("long", 1000), request("short", 20, max_tokens=4)]
        assert first_and_last_step(scheduler, prompts)[0] == expected


def test_1_a_hundred_thousand_tokens_take_49_steps():
    steps = dry_run([Arrival(id="a", prompt=100_000, output=1)], num_blocks=6300)
    assert [step.prefill["a"] for step in steps] == [2048] * 48 + [1696]


def test_2_a_running_request_gets_its_token_in_every_step():
    """sglang #32549: prompts keep arriving, and those that decode stand still. In mixed batches
    they do not: a token every 50 ms, 200 in 10 s, however many prompts come."""
    sent = [Sent(0.0, [1] * 8, 300)] + [Sent(0.04 * i, [2 + i] * 30, 1) for i in range(250)]
    found = simulate(sent, Cost(0.05, 0, 0), num_blocks=2000, max_num_batched_tokens=128)
    assert found.served[0].finished == pytest.approx(300 * 0.05)  # one token in each step


def test_3_preempted_requests_hit_only_themselves(folder):
    """vllm #25780: random prompts, and a hit rate of 30%: those that came back had found their own
    blocks."""
    llm = LLM(folder("llama"), dtype="float32", device="cpu", block_size=4, num_blocks=40)
    prompts = [[i] * 40 for i in range(1, 5)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert llm.stats.preemptions > 0
    assert sum(found for step in llm.trace for found in step.cached.values()) > 0
    assert llm.stats.prefix_cache_queries == 160
    assert llm.stats.prefix_cache_hits == sum(output.cached_tokens for output in outputs) == 0


def test_4_no_prompt_is_begun_that_cannot_be_finished():
    """vllm PR #21793: two prompts of 75 blocks, a pool of 100, chunks of 256: both were let in and
    threw each other out."""
    both = [Arrival(id=name, prompt=1200, output=1) for name in "ab"]
    steps = dry_run(both, num_blocks=101, max_num_batched_tokens=256)
    assert not any(step.preempted for step in steps)
    assert not any("a" in step.tokens and "b" in step.tokens for step in steps)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "head_dim", "kib"),
    [(28, 28, 4, 128, 56), (64, 64, 8, 128, 256), (32, 32, 32, 128, 512)],
    ids=["Qwen2.5-7B", "Qwen3-32B", "Llama-2-7B"],
)
def test_7_and_8_bytes_of_a_token(layers, heads, kv_heads, head_dim, kib):
    """vllm #22291, LMCache #688: heads of the KV and their own size count, not the hidden size."""
    config = ModelConfig(
        vocab_size=2, hidden_size=5120, intermediate_size=2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
        max_position_embeddings=2, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False, qk_norm=False,
    )  # fmt: skip
    assert config.kv_bytes_per_token(torch.float16) == kib << 10


def test_10_usage_counts_blocks_that_somebody_holds():
    """vllm #5176: 0% in use after a request, and its prefix is cached all the same; 17 tokens hold
    two blocks of 16."""
    scheduler = make(101, 16, max_num_batched_tokens=1000)
    model = PretendModel(16)
    for number in range(10):
        scheduler.add(request(f"r{number}", 17, max_tokens=1))
    out = scheduler.schedule()
    assert (100 - scheduler.kv.num_free) / 100 == 0.20
    assert sum(share.num_tokens for share in out.scheduled) / 1600 == 0.10625
    tokens = model.run(out)
    scheduler.update(out, tokens, dict.fromkeys(tokens, 0.0))
    assert scheduler.kv.num_free == 100
    scheduler.add(request("again", out.scheduled[0].request.token_ids[:17]))
    assert scheduler.schedule().admitted == {"again": 16}


# ---- what is found again -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "blocks_of_16", "pages_of_1"),
    [(16, 0, 15), (17, 16, 16), (400, 384, 399), (401, 400, 400), (512, 496, 511)],
)
def test_12_a_prompt_that_is_cached_whole(tokens, blocks_of_16, pages_of_1):
    """vllm PR #11186: the last token is computed in any case, and with it its block."""
    prompts = [range(tokens)] * 2
    assert cached(prompts, block_size=16, num_blocks=100) == [0, blocks_of_16]
    assert cached(prompts, block_size=1, num_blocks=1100, cache="radix") == [0, pages_of_1]


def test_14_one_prompt_three_times_in_one_batch(folder):
    """vllm #9643: is it computed once? With blocks that are published early in the same step; from
    a tree one step later. Their answers are equal."""
    for cache in ("hash", "radix"):
        llm = LLM(folder("llama"), dtype="float32", device="cpu", prefix_cache=cache)
        prompt = [1 + i % 200 for i in range(200)]
        found = llm.generate([prompt] * 3, SamplingParams(temperature=0, max_tokens=4))
        assert [output.cached_tokens for output in found] == [0, 192, 192]
        assert len({tuple(output.token_ids) for output in found}) == 1


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_16_only_one_salt_shares(cache):
    """LMCache #1139: 64 tokens in blocks of 16, seen with one salt: with another they are new."""
    scheduler, model = make(100, 16, cache=cache), PretendModel(16)
    found = []
    for number, salt in enumerate(["a", "a", "b", None]):
        scheduler.add(request(str(number), range(64), salt=salt))
        found += step(scheduler, model).admitted.values()
    assert found == [0, 48, 0, 0]


def test_19_one_counter_two_rates():
    """vllm #42948: 66% over all three requests, 99% over the two that could hit; both are right."""
    found = cached([range(16_007)] * 3, block_size=256, num_blocks=200)
    assert sum(found) == 31_744
    assert sum(found) / 48_021 == pytest.approx(0.661, abs=5e-4)
    assert sum(found) / (2 * 16_007) == pytest.approx(0.992, abs=5e-4)


def test_20_a_clock_at_the_front():
    """anything-llm #6398: token 30 differs in every turn, and all behind it is lost."""
    first = list(range(20_000))
    second = first[:30] + [-1] + first[31:]
    assert cached([first, second], block_size=16, num_blocks=3000) == [0, 16]


@pytest.mark.parametrize(
    ("cache", "size", "reused"), [("radix", 1, 149), ("radix", 16, 144), ("hash", 32, 128)]
)
def test_21_a_second_turn_finds_the_answer_too(cache, size, reused):
    """sglang PR #16521: 100 in, 50 out; the KV of 149 is there, for the last was never fed in."""
    scheduler = make(400, size, cache=cache)
    first = request("first", 100, max_tokens=50)
    first_and_last_step(scheduler, [first])
    scheduler.add(request("second", first.token_ids + [1] * 50))
    assert scheduler.schedule().admitted == {"second": reused}


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize(("prompt", "found"), [(87, 64), (2023, 1984)])
def test_23_no_more_is_cached_than_the_prompt_has(cache, prompt, found):
    """sglang #25972: 128 cached tokens of a prompt of 87, for the prefix was counted twice."""
    assert cached([range(prompt)] * 2, block_size=64, num_blocks=80, cache=cache) == [0, found]


def test_30_positions_go_on_where_the_prompt_ended(folder):
    """LLMs-from-scratch PR #697: the first token after a prompt of 6 stands at 6, not at 12."""
    llm = LLM(folder("llama"), dtype="float32", device="cpu", block_size=4, num_blocks=9)
    for start, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
        batch = PagedBatch(llm.runner.cache, [Segment(start, end, [1, 2, 3])])
        assert batch.positions.tolist() == list(range(start, end))


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize(("documents", "hits"), [(10, 0), (6, 6 * 14_976)])
def test_31_one_document_more_and_all_hits_are_gone(cache, documents, hits):
    """LMCache #1109: 100,000 tokens of pool. Six documents of 15,000 fit, asked in turn; of ten,
    each is gone when it is asked again."""
    rounds = [[-1 - i] * 15_000 for i in range(documents)] * 2
    found = cached(rounds, block_size=32, num_blocks=3126, cache=cache)
    assert sum(found[:documents]) == 0
    assert sum(found[documents:]) == hits


def test_a_pool_that_can_hold_nothing_is_refused():
    for cache in ("hash", "radix", None):
        with pytest.raises(ValueError, match="num_blocks must be at least 2"):
            make_kv(1, 16, cache)
