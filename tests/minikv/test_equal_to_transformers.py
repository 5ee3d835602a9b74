"""Does minikv say what transformers says, however the work is cut, shared, lost and found again?"""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KINDS, VOCAB
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from minikv import LLM, SamplingParams

NUM_OUTPUT = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    """Lengths from one token to several blocks; the first two begin alike."""
    rng = random.Random(5)
    lengths = [45, 37, 1, 70, 16, 33, 8, 52]
    made = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
    made[1][:32] = made[0][:32]
    return made[:count]


def assert_equal(llm, reference, batch, tolerance=1e-4):
    outputs = llm.generate(batch, GREEDY)
    for prompt, output in zip(batch, outputs, strict=True):
        tokens, logprobs = reference.greedy(prompt, NUM_OUTPUT)
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=tolerance)
        assert output.finish_reason == "length"
        assert output.prompt_token_ids == prompt
    return outputs


def test_the_reference_output_varies(reference):
    """Else the comparisons below would show little."""
    for kind in KINDS:
        outputs = [reference(kind).greedy(p, NUM_OUTPUT)[0] for p in prompts(8)]
        assert len({token for output in outputs for token in output}) > 30
        assert len({tuple(output) for output in outputs}) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [2048, 24, 7], ids=["whole", "budget24", "budget7"])
@pytest.mark.parametrize("batch", [1, 8])
def test_batched_and_chunked(kind, budget, batch, folder, reference):
    llm = LLM(folder(kind), dtype="float32", device="cpu", block_size=8,
              max_num_batched_tokens=budget, max_model_len=128)  # fmt: skip
    assert_equal(llm, reference(kind), prompts(batch))
    longest = max(sum(s.prefill.values()) + sum(s.decode.values()) for s in llm.trace)
    assert longest <= budget
    if batch == 8:  # prompts and decodes really shared steps
        assert any(s.prefill and s.decode for s in llm.trace) == (budget < 2048)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [2048, 24])
@pytest.mark.parametrize("cache", ["hash", "radix", None])
@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3"])
def test_preempted(kind, cache, budget, policy, folder, reference):
    """Many requests in a pool for little more than one: most lose their blocks at some time."""
    llm = LLM(folder(kind), dtype="float32", device="cpu", block_size=4, num_blocks=27,
              max_model_len=96, max_num_batched_tokens=budget, scheduling_policy=policy,
              prefix_cache=cache)  # fmt: skip
    batch = prompts(8)
    ranks = [i % 3 if policy == "priority" else 0 for i in range(len(batch))]
    ids = [llm.add_request(p, GREEDY, priority=rank) for p, rank in zip(batch, ranks, strict=True)]
    outputs = {}
    while llm.has_unfinished():
        outputs |= {o.request_id: o for o in llm.step()}
    assert llm.stats.preemptions > 0
    assert sum(o.num_preemptions for o in outputs.values()) == llm.stats.preemptions
    for request_id, prompt in zip(ids, batch, strict=True):
        tokens, logprobs = reference(kind).greedy(prompt, NUM_OUTPUT)
        assert outputs[request_id].token_ids == tokens
        assert outputs[request_id].logprobs == pytest.approx(logprobs, abs=1e-4)
    assert llm.scheduler.kv.num_free == 26


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_prefix_cache_cold_warm_and_off(cache, block_size, folder, reference):
    options = dict(dtype="float32", device="cpu", block_size=block_size, max_model_len=128)
    batch = prompts(8)
    on = LLM(folder("qwen3"), prefix_cache=cache, **options)
    cold = assert_equal(on, reference("qwen3"), batch)
    # The second prompt shares 32 tokens with the first and is admitted in the same step ("hash"),
    # or when they have been computed ("radix").
    assert len(on.trace[0].cached) == (8 if cache == "hash" else 7)
    assert [o.cached_tokens for o in cold] == [0, 32, 0, 0, 0, 0, 0, 0]
    warm = assert_equal(on, reference("qwen3"), batch)
    capped = [(len(p) - 1) // block_size * block_size for p in batch]
    assert [o.cached_tokens for o in warm] == capped
    off = LLM(folder("qwen3"), prefix_cache=None, **options)
    for _ in range(2):
        outputs = assert_equal(off, reference("qwen3"), batch)
        assert not any(o.cached_tokens for o in outputs)
    assert on.reset_prefix_cache()
    again = assert_equal(on, reference("qwen3"), batch)
    assert [o.cached_tokens for o in again] == [o.cached_tokens for o in cold]


def test_a_prompt_may_find_the_output_of_another(folder, reference):
    """Output tokens fill blocks too: a second turn of a talk finds the first turn's answer."""
    llm = LLM(folder("llama"), dtype="float32", device="cpu", block_size=4, max_model_len=128)
    first = llm.generate(prompts(1), GREEDY)[0]
    turn = first.prompt_token_ids + first.token_ids + [5, 6, 7]
    second = assert_equal(llm, reference("llama"), [turn])[0]
    # The last output token was never fed to the model, so it has no keys and values.
    assert second.cached_tokens == (45 + NUM_OUTPUT - 1) // 4 * 4


def test_no_unwritten_slot_is_read(folder, reference):
    """A cache full of NaN gives the same output: only what was computed is ever read."""
    llm = LLM(folder("llama"), dtype="float32", device="cpu", block_size=8, max_model_len=128,
              max_num_batched_tokens=24)  # fmt: skip
    for tensor in (*llm.runner.cache.k, *llm.runner.cache.v):
        tensor.fill_(float("nan"))
    assert_equal(llm, reference("llama"), prompts(8))
    assert all(t[0].isnan().all() for t in llm.runner.cache.k), "the null block was written"


def test_forward_without_cache(folder, reference):
    llm = LLM(folder("tied"), dtype="float32", device="cpu")
    prompt = prompts(1)[0]
    with torch.inference_mode():
        expected = reference("tied").model(torch.tensor([prompt])).logits[0]
    logits = llm.forward(prompt)
    assert logits.shape == (len(prompt), VOCAB)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bfloat16_follows_transformers_closely(folder):
    """In bfloat16 sums round differently, so only closeness is promised: log-probabilities of the
    same tokens within 0.1."""
    llm = LLM(folder("llama"), dtype="bfloat16", device="cpu", block_size=8, max_model_len=128)
    model = LlamaForCausalLM.from_pretrained(folder("llama"), dtype=torch.bfloat16).eval()
    for output in llm.generate(prompts(4), GREEDY):
        tokens = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        n = len(output.prompt_token_ids)
        expected = [float(logits[n + i - 1, t]) for i, t in enumerate(output.token_ids)]
        assert output.logprobs == pytest.approx(expected, abs=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"num_blocks": 14}])
def test_cuda(kind, options, folder, reference):
    """The same on a GPU. Its kernels sum in another order, so log-probabilities may differ by 1e-3
    (float32, TF32 off); tokens are equal, since no two best logits here are that close."""
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = LLM(folder(kind), dtype="float32", device="cuda", block_size=8, max_model_len=96,
              **options)  # fmt: skip
    assert_equal(llm, reference(kind), prompts(8), tolerance=1e-3)
    assert (llm.stats.preemptions > 0) == ("num_blocks" in options)


def test_older_form_of_the_rope_settings(folder, reference, tmp_path):
    """rope_theta and rope_scaling, as before transformers 5; at first the kind was a "type"."""
    for key in ("rope_type", "type"):
        old = shutil.copytree(folder("llama3-rope"), tmp_path / key)
        config = json.loads((old / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = {key: rope.pop("rope_type"), **rope}
        (old / "config.json").write_text(json.dumps(config))
        llm = LLM(old, dtype="float32", device="cpu", max_model_len=128)
        assert_equal(llm, reference("llama3-rope"), prompts(4)[3:])


def test_sharded_weights(folder, reference, tmp_path):
    sharded = shutil.copytree(folder("qwen3"), tmp_path / "sharded")
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    weight_map = {name: f"{i % 2}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in ("0.safetensors", "1.safetensors"):
        save_file({n: t for n, t in weights.items() if weight_map[n] == file}, sharded / file)
    index = {"weight_map": weight_map}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    llm = LLM(sharded, dtype="float32", device="cpu", max_model_len=128)
    assert_equal(llm, reference("qwen3"), prompts(2))


def test_a_trained_model():
    """SmolLM2-135M-Instruct in float32: a chat, and a longer text cut into chunks beside it."""
    from kvlab.models import get

    path = get("smollm2-135m")
    llm = LLM(path, dtype="float32", device="cpu", max_num_batched_tokens=24, max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    messages = [{"role": "user", "content": "Where does the river Rhône end? Answer briefly."}]
    text = "The KV cache keeps the keys and values of every token, so that " * 3
    outputs = [llm.chat(messages, params), *llm.generate([text, "Je mange à 7 h. 你好"], params)]

    theirs = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert outputs[0].prompt_token_ids == chat
    for output in outputs:
        tokens = output.prompt_token_ids + output.token_ids
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        rows = logprobs[len(output.prompt_token_ids) - 1 : -1]
        assert output.token_ids == rows.argmax(-1).tolist()
        assert output.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
        assert output.text == theirs.decode(output.token_ids, skip_special_tokens=True)
