"""What cannot work is refused at once, with a sentence that says what is wrong."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minikv import LLM, SamplingParams
from minikv.weights import eos_token_ids, read_json


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder("llama"), dtype="float32", device="cpu", block_size=4, num_blocks=11)


@pytest.fixture
def broken(folder, tmp_path):
    """broken(**changes): a copy of the tiny model with other settings; None removes one."""

    def make(**changes):
        path = shutil.copytree(folder("llama"), tmp_path / "model")
        config = json.loads((path / "config.json").read_text()) | changes
        config = {name: value for name, value in config.items() if value is not None}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def refuses(message):
    return pytest.raises(ValueError, match=message)


# ---- prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 40, "the prompt has 40 tokens, which leaves no room .* max_model_len=40: shorten"),
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([1, 320], r"token id 320 is outside the vocabulary \(0 to 319\)"),
        ([-1], "token id -1 is outside the vocabulary"),
        ([[1, 2.5]], "a text or a list of whole numbers"),
        ([1, "a"], "a text or a list of whole numbers"),
        ([[True]], "a text or a list of whole numbers"),
        ({"text": "hello"}, "a text or a list of whole numbers .*; got {'text': 'hello'}"),
        ([{"text": "hello"}], "a text or a list of whole numbers .*; got {'text': 'hello'}"),
        (None, "a text or a list of whole numbers .*; got None"),
        ([None], "a text or a list of whole numbers .*; got None"),
        ("\ud800", "the text is not valid Unicode"),
        (7, "a text or a list of whole numbers .*; got 7"),
        (b"hello", "a text or a list of whole numbers .*; got b'hello'"),
    ],
)
def test_prompts(llm, prompt, message):
    with refuses(message):
        llm.generate(prompt)


def test_a_bad_prompt_stops_the_whole_call_before_it_starts(llm):
    before = llm.stats.steps
    with refuses("token id 999"):
        llm.generate([[1, 2], [999]])
    assert not llm.has_unfinished()
    assert llm.stats.steps == before


def test_stream_and_add_request_refuse_at_once(llm):
    for call in (llm.stream, llm.add_request, llm.forward):
        with refuses("token id 999"):
            call([999])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(sampling_params={"max_tokens": 3}), "sampling_params must be SamplingParams"),
        (dict(sampling_params=7), "sampling_params must be SamplingParams; got 7"),
        (dict(priority=1), r"priorities need LLM\(\.\.\., scheduling_policy=.priority.\)"),
        (dict(priority=[0, None]), "priority must be a whole number; got None"),
        (dict(cache_salt=7), "cache_salt must be a text or None; got 7"),
        (dict(cache_salt="\ud800"), "cache_salt has no UTF-8 form"),
    ],
)
def test_a_bad_option_leaves_nothing_behind(llm, options, message):
    with refuses(message):
        llm.generate([[1] * 8, [2] * 8], **options)
    assert not llm.has_unfinished()
    assert len(llm.generate([1] * 8, SamplingParams(max_tokens=1))) == 1


def test_a_salt_that_no_hash_can_take_is_refused_before_it_is_hashed(llm):
    """Of a prompt shorter than a block nothing is hashed until a step has filled the block."""
    with refuses("cache_salt has no UTF-8 form"):
        llm.add_request([1], cache_salt="\ud800")
    assert not llm.has_unfinished()


@pytest.mark.parametrize("messages", [None, [], {}, "hello", [None], [{"content": "hello"}]])
def test_a_chat_needs_messages(llm, messages):
    with refuses(r"messages must be a list such as \[\{"):
        llm.chat(messages)


def test_forward_keeps_to_the_models_length(llm):
    with refuses("257 tokens, but the model was made for 256"):
        llm.forward([1] * 257)


def test_numbers_of_numpy_and_torch_are_numbers(llm):
    params = SamplingParams(
        temperature=np.float32(0), max_tokens=np.int64(2), seed=torch.tensor(3), stop=None
    )
    assert len(llm.generate(torch.tensor([1, 2, 3]), params)[0].token_ids) <= 2


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_one_setting_for_all_or_one_for_each(llm):
    with refuses("2 prompts but 1 sampling_params: give one, or one for each"):
        llm.generate([[1], [2]], [SamplingParams()])
    with refuses("1 prompts but 2 priority"):
        llm.generate([[1]], priority=[0, 1])


def test_text_needs_a_tokenizer(broken):
    path = broken()
    (path / "tokenizer.json").unlink()
    llm = LLM(path, device="cpu")
    assert len(llm.generate([1, 2], SamplingParams(max_tokens=2))[0].token_ids) in (1, 2)
    with refuses("no tokenizer.json: give prompts as token ids"):
        llm.generate("text")
    with refuses("no tokenizer.json"):
        llm.generate([1], SamplingParams(stop="."))
    with refuses("no tokenizer.json"):
        llm.chat([{"role": "user", "content": "text"}])


# ---- how to sample -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(max_tokens=0), "max_tokens must be at least 1; got 0"),
        (dict(max_tokens=-3), "max_tokens must be at least 1; got -3"),
        (dict(max_tokens=2.5), "max_tokens must be a whole number; got 2.5"),
        (dict(max_tokens=True), "max_tokens must be a whole number; got True"),
        (dict(temperature=-0.1), "temperature must be a finite number, 0 .*; got -0.1"),
        (dict(temperature=float("nan")), "temperature must be a finite number.*; got nan"),
        (dict(temperature=float("inf")), "temperature must be a finite number.*; got inf"),
        (dict(top_p=0), r"top_p must be in \(0, 1\].*; got 0"),
        (dict(top_p=1.01), r"top_p must be in \(0, 1\].*; got 1.01"),
        (dict(top_p=float("nan")), r"top_p must be in \(0, 1\].*; got nan"),
        (dict(temperature="0"), "temperature must be a finite number.*; got '0'"),
        (dict(temperature=None), "temperature must be a finite number.*; got None"),
        (dict(top_p=None), r"top_p must be in \(0, 1\].*; got None"),
        (dict(seed=[1]), r"seed must be a whole number; got \[1\]"),
        (dict(stop_token_ids=["a"]), "stop_token_ids must be a whole number; got 'a'"),
        (dict(stop_token_ids="ab"), "stop_token_ids must be a whole number; got 'a'"),
        (dict(stop=""), "stop must be non-empty strings"),
        (dict(stop=["a", ""]), "stop must be non-empty strings"),
        (dict(stop=[1]), "stop must be non-empty strings"),
    ],
)
def test_sampling_params(values, message):
    with refuses(message):
        SamplingParams(**values)


# ---- how much memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_blocks=1), "num_blocks must be at least 2 .*; got 1"),
        (dict(kv_cache_memory_bytes=1000), "raise it|must be at least 2"),
        (dict(block_size=0), "block_size must be at least 1; got 0"),
        (dict(num_blocks=3, block_size=4, max_model_len=9),
         "max_model_len=9, but the KV cache holds 8 tokens: lower it, or raise num_blocks"),
        (dict(max_model_len=100_000), "max_model_len=100000, but the model was made for 256"),
        (dict(max_model_len=1), "max_model_len must be at least 2"),
        (dict(num_blocks=10**9), "the KV cache would take .* GB, and there are .* GB in all"),
        (dict(kv_cache_memory_bytes=64e6), "kv_cache_memory_bytes must be a whole number"),
        (dict(max_model_len=10.5), "max_model_len must be a whole number; got 10.5"),
        (dict(max_num_batched_tokens=0), "max_num_batched_tokens must be at least 1"),
        (dict(max_num_seqs=0), "max_num_seqs must be at least 1"),
        (dict(scheduling_policy="sjf"), "scheduling_policy must be one of .*; got 'sjf'"),
        (dict(dtype="int8"), "dtype must be auto, float32, bfloat16, float16; got 'int8'"),
        (dict(device="tpu"), "device must be auto, cpu or cuda; got 'tpu'"),
    ],
)  # fmt: skip
def test_engine_settings(folder, options, message):
    with refuses(message):
        LLM(folder("llama"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_no_gpu(folder):
    with refuses("this torch sees no GPU: use 'cpu' or 'auto'"):
        LLM(folder("llama"), device="cuda")


# ---- the model folder --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="gpt2"), "model_type 'gpt2' is not supported; minikv knows llama, qwen3"),
        (dict(model_type=None), "model_type None is not supported"),
        (dict(quantization_config={"quant_method": "awq"}),
         r"quantised checkpoints \(awq\) are not supported: use an original one"),
        (dict(model_type="qwen3", use_sliding_window=True, sliding_window=128),
         "sliding window attention is not supported"),
        (dict(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]),
         "sliding window attention is not supported"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported, only 'silu'"),
        (dict(vocab_size=None, hidden_size=None), "config.json lacks vocab_size, hidden_size"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 key-value heads evenly"),
        (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
         "RoPE type 'yarn' is not supported; minikv knows 'default', 'llama3'"),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 4.0}),
         "RoPE type 'llama3' in config.json lacks low_freq_factor"),
        (dict(partial_rotary_factor=0.5, rope_parameters={"rope_theta": 1e4}),
         "partial_rotary_factor is not supported"),
        (dict(rope_parameters="linear"), "config.json holds a value of the wrong kind"),
        (dict(layer_types=5), "config.json holds a value of the wrong kind"),
        (dict(num_hidden_layers=3), "model.layers.2.* is missing.* and .* more"),
        (dict(num_hidden_layers=1), "model.layers.1.* is unknown"),
        (dict(vocab_size=321), r"embed_tokens.weight has shape \[320, 64\], config.json says"),
    ],
)  # fmt: skip
def test_models_that_would_be_computed_wrongly(broken, changes, message):
    with refuses(message):
        LLM(broken(**changes), device="cpu")


def test_no_such_folder(tmp_path):
    with refuses(r"config.json is missing: is .* a model folder\?"):
        LLM(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json is not valid JSON .*: fetch it again"),
        ("config.json", "[]", "config.json must hold a JSON object, not a list"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read .*: fetch the model again"),
        ("model.safetensors", "", "model.safetensors is broken or cut short .*: fetch the model"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "lost.safetensors"}}',
         "weight file .*lost.safetensors is missing: fetch the model again"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../a.safetensors"}}',
         "names '../a.safetensors', which is not a file of its own folder"),
    ],
)  # fmt: skip
def test_broken_files(broken, file, content, message):
    path = broken()
    (path / file).write_text(content)
    with refuses(message):
        LLM(path, device="cpu")


def test_missing_weights(broken):
    path = broken()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with refuses("model.safetensors is missing: minikv loads safetensors only"):
        LLM(path, device="cpu")


def test_weights_cut_short(broken):
    path = broken() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with refuses("model.safetensors is broken or cut short .*: fetch the model again"):
        LLM(path.parent, device="cpu")


def test_one_weight_lost(broken):
    path = broken() / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path)
    with refuses("model.norm.weight is missing"):
        LLM(path.parent, device="cpu")


def test_weights_that_give_no_number(broken):
    path = broken() / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] *= float("nan")
    save_file(weights, path)
    llm = LLM(path.parent, dtype="float32", device="cpu")
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.5, seed=1)):
        with refuses("the model gave NaN: its weights are damaged"):
            llm.generate([1, 2, 3], params)
        assert not llm.has_unfinished()


def test_an_end_token_of_null_leaves_that_of_the_config(broken):
    path = broken(eos_token_id=7)
    (path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert eos_token_ids(path, read_json(path / "config.json")) == {7}
