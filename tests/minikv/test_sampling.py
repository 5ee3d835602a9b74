"""Does chance follow the distribution it should, and only its own seed?"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from minikv import LLM, SamplingParams
from minikv.runner import sample

PROMPTS = [[7, 8, 9, 10] * 5, [200, 3, 77], [5] * 40, [11, 12]]


def llm(folder, **options):
    options = dict(dtype="float32", device="cpu", block_size=4, max_model_len=80) | options
    return LLM(folder("qwen3"), **options)


def tokens(outputs):
    return [o.token_ids for o in outputs]


def params(seed, **options):
    return SamplingParams(**dict(max_tokens=16, seed=seed, ignore_eos=True) | options)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_seed_gives_the_same_tokens_in_any_company(folder, top_p):
    """Alone, batched, in chunks, with a warm cache, after preemption: the draws are its own."""
    mine = [params(i, top_p=top_p) for i in range(4)]
    engine = llm(folder)
    alone = [engine.generate(p, s)[0].token_ids for p, s in zip(PROMPTS, mine, strict=True)]
    assert len(set(map(tuple, alone))) == 4
    assert tokens(engine.generate(PROMPTS, mine)) == alone  # in one batch, and the cache is warm
    assert tokens(llm(folder, max_num_batched_tokens=7).generate(PROMPTS, mine)) == alone
    tight = llm(folder, num_blocks=21)
    assert tokens(tight.generate(PROMPTS, mine)) == alone
    assert tight.stats.preemptions > 0
    reverse = [params(100 + i) for i in range(3)] + [mine[0]]
    assert tokens(engine.generate([[9], [8], [7], PROMPTS[0]], reverse))[-1] == alone[0]


def test_requests_without_a_seed_differ_and_repeat_with_the_engine(folder):
    free = params(None)
    first, second = (llm(folder, seed=3).generate([PROMPTS[0]] * 4, free) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert len(set(map(tuple, tokens(first)))) == 4
    assert tokens(llm(folder, seed=4).generate([PROMPTS[0]] * 4, free)) != tokens(first)


def test_logprobs_are_those_of_the_raw_logits(folder):
    """Before temperature and top_p, as vLLM's raw_logprobs."""
    engine = llm(folder)
    output = engine.generate(PROMPTS[0], params(1, temperature=0.5, top_p=0.8))[0]
    rows = engine.forward(PROMPTS[0] + output.token_ids).log_softmax(-1)[len(PROMPTS[0]) - 1 :]
    expected = [float(rows[i, t]) for i, t in enumerate(output.token_ids)]
    assert output.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_temperature_near_zero_is_raised_as_vllm_does():
    assert SamplingParams(temperature=1e-6).temperature == 0.01
    assert SamplingParams(temperature=0.02).temperature == 0.02
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def kept_by_hand(probs: list[float], top_p: float) -> list[float]:
    """Most likely first, until the mass is reached; then shares of what was kept."""
    kept, mass = {}, 0.0
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        if mass >= top_p:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return [kept.get(token, 0.0) / mass for token in range(len(probs))]


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.6, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(top_p, temperature):
    """A fine comb of uniform numbers must hit each token as often as its share says."""
    logits = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2]))
    choice = SamplingParams(temperature=temperature, top_p=top_p)
    count = 4000
    hits = Counter(sample(logits, choice, (i + 0.5) / count) for i in range(count))
    expected = kept_by_hand((logits / temperature).softmax(-1).tolist(), top_p)
    for token, share in enumerate(expected):
        assert hits[token] / count == pytest.approx(share, abs=2 / count)
        assert (hits[token] > 0) == (share > 0)


def test_distribution_of_an_engine(folder):
    """2,000 first tokens, each with its seed, against the model's own probabilities."""
    engine = llm(folder)
    probs = engine.forward(PROMPTS[1])[-1].softmax(-1)
    many = [params(i, max_tokens=1) for i in range(2000)]
    counts = Counter(o.token_ids[0] for o in engine.generate([PROMPTS[1]] * 2000, many))
    top = probs.topk(5)
    for share, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        deviation = (share * (1 - share) / 2000) ** 0.5
        assert counts[token] / 2000 == pytest.approx(share, abs=4 * deviation)


def test_edges_of_the_uniform_number():
    """0 takes the first token that has any probability, almost 1 the last; none has none."""
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf])
    plain = SamplingParams()
    assert sample(logits, plain, 0.0) == 1
    assert sample(logits, plain, 1 - 2**-53) == 3
    for top_p in (0.4, 0.999):
        assert sample(logits, SamplingParams(top_p=top_p), 0.0) == 1
        assert sample(logits, SamplingParams(top_p=top_p), 1 - 2**-53) in (1, 3)


def test_a_tiny_top_p_is_greedy(folder):
    engine = llm(folder)
    greedy = engine.generate(PROMPTS, params(None, temperature=0))
    assert tokens(engine.generate(PROMPTS, params(5, top_p=1e-9))) == tokens(greedy)
