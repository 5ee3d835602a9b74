"""A model in the cache is whole, or it is made again."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kvlab import models
from kvlab.paths import ROOT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(models.ModelError, match=r"smollm2-135m, tiny-random, Qwen3-0\.6B"):
        models.get("gpt-7")


def test_two_processes_make_a_model_once(cache):
    program = "from kvlab import models; print(models.get('tiny-random'))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "shared"), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].decode().splitlines()[-1] for process in both]
    assert said == [str(cache / "models" / "tiny-random")] * 2
    assert models.damage(cache / "models" / "tiny-random", deep=True) == ""
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny-random"]


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest"])
def test_a_damaged_model_is_found_and_made_again(cache, capsys, harm):
    folder = models.get("tiny-random")
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    if harm == "truncate":
        os.truncate(weights, 1000)
    elif harm == "remove":
        weights.unlink()
    else:
        (folder / models.MANIFEST).write_text("{")
    capsys.readouterr()
    assert models.get("tiny-random") == folder
    assert "is damaged" in capsys.readouterr().out
    assert weights.read_bytes() == before


def test_a_flipped_byte_is_found_by_a_deep_look(cache):
    folder = models.get("tiny-random")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert models.damage(folder) == ""
    assert "SHA-256" in models.damage(folder, deep=True)


def test_a_stop_halfway_leaves_nothing_taken_for_whole(cache, monkeypatch):
    def stopped(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    recipe = models._RECIPES["tiny-random"]
    monkeypatch.setitem(models._RECIPES, "tiny-random", stopped)
    with pytest.raises(KeyboardInterrupt):
        models.get("tiny-random")
    assert not (cache / "models" / "tiny-random").exists()
    monkeypatch.setitem(models._RECIPES, "tiny-random", recipe)
    assert models.damage(models.get("tiny-random"), deep=True) == ""


def test_tiny_random_has_text_and_varied_greedy_output(cache):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = models.get("tiny-random")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 世界!\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([ids])
    output = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=48,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert len(set(output[0, len(ids) :].tolist())) > 24


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\0" * 100])
def test_a_damaged_configuration_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(models.ModelError, match="get the model anew"):
        models.config(tmp_path)


def test_without_a_network_a_hub_id_says_so(cache, monkeypatch):
    program = (
        "from kvlab import models\n"
        "try: models.get('some/model')\n"
        "except models.ModelError as error: print(error)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "shared"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert "could not be downloaded from the hub" in done.stdout, done.stderr
    assert "smollm2-135m, tiny-random are there" in done.stdout


def test_smollm2_is_a_plain_bfloat16_llama():
    folder = models.get("smollm2-135m")  # the one that the set-up made
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert models.damage(folder, deep=True) == ""
