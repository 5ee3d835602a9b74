"""The scheduler on a virtual clock: by hand, and beside the dry run."""

from __future__ import annotations

import random

import pytest

from minikv.simulate import Cost, Sent, simulate
from minikv.trace import Arrival, dry_run


def test_by_hand() -> None:
    """Steps of 1 s, and 0.1 s for each prefill token, 0.01 for each decode token."""
    cost = Cost(step=1, prefill_token=0.1, decode_token=0.01)
    prompts = [Sent(0, [1] * 10, 2), Sent(0.5, [2] * 20, 1), Sent(10, [1] * 10, 1)]
    found = simulate(prompts, cost, num_blocks=20, block_size=4)
    a, b, c = found.served
    assert (a.first_token, a.finished) == (pytest.approx(2), pytest.approx(2 + 1 + 2 + 0.01))
    # It came while the first step ran, and shares the second one with the first one's decode.
    assert b.first_token == b.finished == a.finished
    # Nobody was there: the clock went on to its arrival; two of its blocks were cached.
    assert (c.cached_tokens, c.first_token) == (8, pytest.approx(10 + 1 + 0.2))
    assert (found.steps, found.computed_tokens) == (3, 10 + 1 + 20 + 2)
    assert found.seconds == c.finished


def test_reading_context_has_its_price() -> None:
    cost = Cost(step=0, prefill_token=0, decode_token=0, context_token=1)
    found = simulate([Sent(0, [1] * 6, 3)], cost, num_blocks=9, block_size=4)
    assert found.seconds == 6 + 7 + 8


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_one_second_are_those_of_the_dry_run(seed: int) -> None:
    """The clock alone is new: with steps of 1 s a moment is a step, and the steps are the same."""
    rng = random.Random(seed)
    settings = {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    arrivals = [
        Arrival(
            id=str(i),
            prompt=[rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 30))],
            output=rng.randint(1, 12),
            step=step,
        )
        for i, step in enumerate(sorted(rng.randrange(15) for _ in range(8)))
    ]
    settings["prefix_cache"] = rng.choice(["hash", "radix", None])
    steps = dry_run(arrivals, **settings)
    sent = [Sent(float(a.step), list(a.prompt), a.output) for a in arrivals]
    found = simulate(sent, Cost(1, 0, 0), **settings)
    assert found.steps == len(steps)
    assert found.computed_tokens == sum(sum(step.tokens.values()) for step in steps)
    assert sum(one.preemptions for one in found.served) == sum(len(s.preempted) for s in steps)
    for arrival, one in zip(arrivals, found.served, strict=True):
        mine = [step for step in steps if arrival.id in step.tokens]
        assert one.finished == mine[-1].index + 1
        assert one.cached_tokens == next(
            s.cached[arrival.id] for s in mine if arrival.id in s.cached
        )


def test_what_cannot_be_served_is_refused() -> None:
    cost = Cost(1, 0, 0)
    for sent, words in (
        ([Sent(0, [], 1)], "request 0 has 0"),
        ([Sent(0, [1], 0)], "1 \\+ 0 tokens"),
        ([Sent(0, [1] * 30, 1)], "holds 28"),
        ([Sent(2, [1], 1), Sent(1, [1], 1)], "request 1 comes at 1, after one at 2"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(sent, cost, num_blocks=8, block_size=4)


def test_many_requests_under_pressure_are_all_served() -> None:
    rng = random.Random(0)
    at, sent = 0.0, []
    for _ in range(2000):
        at += rng.expovariate(3)
        shared = [1] * rng.choice([0, 16, 32])
        sent.append(Sent(at, [*shared, *(rng.randrange(9) for _ in range(rng.randint(1, 40)))], 8))
    found = simulate(sent, Cost(0.01, 0.001, 0.002), num_blocks=60, block_size=8)
    assert all(one.at < one.first_token <= one.finished for one in found.served)
    assert len(found.served) == 2000
    assert sum(one.cached_tokens for one in found.served) > 0
