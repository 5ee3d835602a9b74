"""Text of a real model: its chat template and its tokenizer, compared with transformers'."""

import pytest
import tokenizers
from transformers import AutoTokenizer

from kvlab import models
from minikv.tokenizer import Detokenizer, Tokenizer

TEXTS = [
    "Where does the river Rhône 🏞 end?",
    "  two spaces, a\ttab\n\nand 𝄞 🙂🚀 缓存里的块 “quoted” ",
    "<|im_start|> written by a user, {{ braces }} & <html>",
]


@pytest.fixture(scope="module")
def both():
    path = models.get("smollm2-135m")
    return Tokenizer(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_tokens(both, text):
    ours, theirs = both
    assert ours.encode(text) == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == theirs.decode(
        theirs(text).input_ids, skip_special_tokens=True
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("system", [None, "Answer in one word."])
def test_the_same_chat(both, text, system):
    """With and without a system message (the template brings its own), and over several turns."""
    ours, theirs = both
    talk = [{"role": "system", "content": system}] if system else []
    for role, content in (("user", text), ("assistant", "In the sea."), ("user", "Which?")):
        talk.append({"role": role, "content": content})
        expected = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        assert ours.apply_chat_template(talk) == expected


@pytest.mark.parametrize("text", TEXTS[:2])
def test_a_stream_shows_the_text_and_no_half_character(both, text):
    ours, _ = both
    detokenizer, pieces = Detokenizer(ours), []
    for token in ours.encode(text):
        before = len(detokenizer.text)
        detokenizer.append(token)
        pieces.append(detokenizer.text[before:])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some token was a part of a character


def test_the_space_between_prompt_and_output_is_kept(tmp_path):
    """A tokenizer of Llama 2's kind drops the space before the first token of a text; but the
    output begins in the middle of one."""
    words = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([2, 3]) == "world!"
    detokenizer = Detokenizer(tokenizer, prompt=[1])
    for token in (2, 3):
        detokenizer.append(token)
    assert detokenizer.text == " world!"


def test_half_a_character_of_the_prompt_is_not_output(both):
    ours, _ = both
    prompt = ours.encode("The file says \ufffd\ufffd")
    detokenizer = Detokenizer(ours, stop=["\ufffd"], prompt=prompt)
    assert not any(detokenizer.append(token) for token in ours.encode(" and ends"))
    assert detokenizer.text == " and ends"
