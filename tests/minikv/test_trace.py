"""A dry run takes the steps of the engine, and says what cannot be run."""

import pytest

from minikv import LLM, SamplingParams
from minikv.trace import Arrival, dry_run

SETTINGS = {"block_size": 4, "num_blocks": 20, "max_num_batched_tokens": 24}


def test_the_steps_are_those_of_the_engine(folder):
    """With a model and without: the same tokens for the same requests, preemptions too."""
    llm = LLM(folder("llama"), dtype="float32", device="cpu", max_model_len=76, **SETTINGS)
    prompts = [[1 + i] * (10 + 7 * i) for i in range(4)]
    params = [SamplingParams(temperature=0, max_tokens=20 - i, ignore_eos=True) for i in range(4)]
    llm.generate(prompts, params)
    arrivals = [
        Arrival(id=str(i), prompt=prompt, output=20 - i) for i, prompt in enumerate(prompts)
    ]
    assert dry_run(arrivals, prefix_cache="hash", **SETTINGS) == list(llm.trace)
    assert llm.stats.preemptions > 0


def test_the_first_to_arrive_is_first_wherever_it_is_listed():
    late, early = (
        Arrival(id=n, prompt=8, output=1, step=s) for n, s in (("late", 3), ("early", 1))
    )
    first = Arrival(id="first", prompt=8, output=9)
    steps = dry_run([late, first, early], max_num_seqs=1, policy="priority")
    assert [next(iter(step.prefill)) for step in steps if step.prefill] == [
        "first",
        "early",
        "late",
    ]


@pytest.mark.parametrize("arrival", [dict(prompt=0, output=1), dict(prompt=70, output=7)])
def test_what_can_never_run_is_refused(arrival):
    with pytest.raises(ValueError, match="a prompt has at least one, and the 19 usable blocks"):
        dry_run([Arrival(id="a", **arrival)], **SETTINGS)


def test_a_run_without_end_ends():
    with pytest.raises(RuntimeError, match="not done after 5 steps"):
        dry_run([Arrival(id="a", prompt=4, output=9)], max_steps=5)
