"""Does a stream say the same as the whole, never half a character and never too much?"""

from __future__ import annotations

import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EOS, TEXT, make_tokenizer

from minikv import LLM, SamplingParams
from minikv.tokenizer import REPLACEMENT, Detokenizer, Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder("llama"), dtype="float32", device="cpu", block_size=4, max_model_len=96)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


# ---- the engine's streams ------------------------------------------------------------------------


def test_the_pieces_are_the_whole(llm):
    whole = llm.generate("The request", GREEDY)[0]
    pieces = list(llm.stream("The request", GREEDY))
    assert len(pieces) == 24  # one for each token, as it comes
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    logprobs = [x for p in pieces for x in p.logprobs]
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert [p.finish_reason for p in pieces] == [None] * 23 + ["length"]


def test_several_streams_and_a_batch_side_by_side(llm):
    expected = [o.text for o in llm.generate(["one", "two", "three"], GREEDY)]
    a, b = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    texts = [next(a).text, next(b).text, llm.generate("three", GREEDY)[0].text]
    texts[0] += "".join(p.text for p in a)  # what others' steps made for it is not lost
    texts[1] += "".join(p.text for p in b)
    assert texts == expected
    assert llm.step() == []


@pytest.mark.parametrize("how", ["close", "drop", "exhaust"])
def test_a_stream_that_ends_leaves_no_blocks(llm, how):
    pool = llm.scheduler.kv.pool
    stream = llm.stream("The request waits", GREEDY)
    assert not llm.has_unfinished()  # it starts with the first `next`
    next(stream)
    assert pool.num_free < pool.num_blocks - 1
    if how == "close":
        stream.close()
    elif how == "drop":
        del stream
    else:
        list(stream)
    assert pool.num_free == pool.num_blocks - 1
    assert not llm.has_unfinished()


def test_invalid_input_is_refused_before_the_first_next(llm):
    with pytest.raises(ValueError, match="empty"):
        llm.stream("", GREEDY)


# ---- where a text stops --------------------------------------------------------------------------


def test_stop_strings_across_token_borders(llm):
    """Every substring of the output, as a stop string, cuts it at its first appearance; the stream
    ends at the same place and has shown nothing beyond."""
    whole = llm.generate("The request", GREEDY)[0].text
    assert len(whole) > 12
    rng = random.Random(0)
    for _ in range(12):
        start = rng.randrange(len(whole) - 1)
        stop = whole[start : start + rng.randint(1, 6)]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
        output = llm.generate("The request", params)[0]
        assert (output.text, output.finish_reason) == (whole[: whole.index(stop)], "stop")
        pieces = list(llm.stream("The request", params))
        assert "".join(p.text for p in pieces) == output.text
        assert pieces[-1].finish_reason == "stop"
        assert [t for p in pieces for t in p.token_ids] == output.token_ids
    pool = llm.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks - 1


def test_a_stop_string_that_never_completes_holds_nothing_back_at_the_end(llm):
    whole = llm.generate("The request", GREEDY)[0].text
    stop = whole[-2:] + "never follows"
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
    pieces = list(llm.stream("The request", params))
    assert "".join(p.text for p in pieces) == whole
    assert pieces[-1].finish_reason == "length"


def test_a_stop_string_in_the_last_token_counts_as_a_stop(llm):
    whole = llm.generate("The request", GREEDY)[0]
    for count in range(1, 25):  # a length at which the last token completes a character
        short = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        text = llm.generate("The request", short)[0].text
        if text and whole.text.index(text[-1]) == len(text) - 1:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, stop=text[-1])
            output = llm.generate("The request", params)[0]
            assert (output.finish_reason, output.text) == ("stop", text[:-1])
            return
    pytest.fail("no such length: choose another prompt")


def test_stop_tokens_and_end_of_sequence(llm, reference):
    """The token that ends an output is in `token_ids`, with its log-probability, not in `text`."""
    prompt = [65, 66, 67]
    tokens, logprobs = reference("llama").greedy(prompt, 24)
    stop = tokens[6]
    first = tokens.index(stop)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate(prompt, params)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: first + 1]
    assert output.logprobs == pytest.approx(logprobs[: first + 1], abs=1e-4)
    assert output.text == llm.tokenizer.decode(tokens[:first]).rstrip(REPLACEMENT)


def test_end_of_sequence_from_the_generation_config(folder, reference, tmp_path):
    """A list there, which outranks config.json; `ignore_eos` goes on."""
    prompt = [65, 66, 67]
    tokens, _ = reference("llama").greedy(prompt, 24)
    copy = shutil.copytree(folder("llama"), tmp_path / "model")
    config = {"eos_token_id": [EOS, tokens[4]]}
    (copy / "generation_config.json").write_text(json.dumps(config))
    llm = LLM(copy, dtype="float32", device="cpu", max_model_len=64)
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert llm.generate(prompt, GREEDY)[0].token_ids == tokens


# ---- the detokenizer alone -----------------------------------------------------------------------


def feed(tokenizer, token_ids, stop=()):
    """All that a stream would show, piece by piece."""
    detokenizer, shown, pieces = Detokenizer(tokenizer, stop), 0, []
    for token in token_ids:
        stopped = detokenizer.append(token)
        end = len(detokenizer.text) if stopped else detokenizer.num_safe
        pieces.append(detokenizer.text[shown:end])
        shown = max(shown, end)
        if stopped:
            break
    return detokenizer, pieces


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_text_comes_back_whole(tokenizer, text):
    token_ids = tokenizer.encode(text)
    _, pieces = feed(tokenizer, token_ids)
    assert "".join(pieces).rstrip(REPLACEMENT) == text.rstrip(REPLACEMENT)
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


@given(st.lists(st.integers(0, EOS), max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_tokens_give_what_the_tokenizer_gives(tokenizer, token_ids):
    """But for an unfinished character at the end, which is not shown."""
    detokenizer, pieces = feed(tokenizer, token_ids)
    assert "".join(pieces) == detokenizer.text
    whole = tokenizer.decode(token_ids)
    assert whole.startswith(detokenizer.text)
    assert set(whole[len(detokenizer.text) :]) <= {REPLACEMENT}


def test_a_character_waits_for_its_last_byte(tokenizer):
    """Rare characters are four tokens here, one for each byte."""
    token_ids = tokenizer.encode("a𝄞b")
    assert len(token_ids) == 6
    assert feed(tokenizer, token_ids)[1] == ["a", "", "", "", "𝄞", "b"]


def test_what_may_become_a_stop_string_waits(tokenizer):
    token_ids = [t for c in "xabyabc!" for t in tokenizer.encode(c)]
    detokenizer, pieces = feed(tokenizer, token_ids, ("abc",))
    assert pieces == ["x", "", "", "aby", "", "", ""]
    assert detokenizer.text == "xaby"
    assert feed(tokenizer, token_ids, ("zz", "by"))[0].text == "xa"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_any_stop_strings(tokenizer, text, stop):
    """The text up to the stop string that is complete first; nothing of it was ever shown."""
    token_ids = [t for c in text for t in tokenizer.encode(c)]
    detokenizer, pieces = feed(tokenizer, token_ids, stop)
    ends = [text.index(s) + len(s) for s in stop if s in text]
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.index(s) for s in stop if s in seen)]
    else:
        expected = text
    assert detokenizer.text == expected
    assert expected.startswith("".join(pieces))


# ---- chat ----------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": TEXT}]
    prompt = f"user: {TEXT}\nassistant:"
    assert llm.tokenizer.apply_chat_template(messages) == llm.tokenizer.encode(prompt)
    short = [{"role": "user", "content": "Hi"}]
    output = llm.chat(short, GREEDY)
    assert output.token_ids == llm.generate("user: Hi\nassistant:", GREEDY)[0].token_ids


def test_a_template_can_refuse_and_can_do_no_harm(llm, folder, tmp_path):
    with pytest.raises(ValueError, match="unknown role robot"):
        llm.chat([{"role": "robot", "content": "Hi"}])
    (tmp_path / "tokenizer.json").write_bytes((folder("llama") / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}])
    for harm in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for m in",
        "{{ 1 / 0 }}",
    ):
        (tmp_path / "chat_template.jinja").write_text(harm)
        with pytest.raises(ValueError, match="template"):
            Tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "Hi"}])
