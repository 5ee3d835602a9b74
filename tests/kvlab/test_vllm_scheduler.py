"""minikv's scheduler takes the same steps as vLLM 0.32.0's own, on random requests."""

import random

import pytest
from engine_help import need

from kvlab.engines import vllm_scheduler
from kvlab.engines.protocol import EngineError
from minikv.trace import Arrival, dry_run

need("vllm")

RUNS = 300


def random_run(seed):
    """Requests and settings for which something is always scarce."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4])
    longest = 32  # tokens of prompt and output
    settings = {
        "block_size": block_size,
        "num_blocks": longest // block_size + 1 + rng.randrange(12),
        "max_num_batched_tokens": rng.randint(2, 40),
        "max_num_seqs": rng.randint(1, 6),
        "long_prefill_token_threshold": rng.choice([0, 0, 2, 5]),
        "policy": rng.choice(["fcfs", "priority"]),
        "prefix_cache": "hash" if rng.random() < 0.6 else None,
    }
    arrivals = [
        Arrival(
            id=f"r{number:02}",
            # Of two kinds of token: prompts share their beginnings often.
            prompt=[rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 20))],
            output=rng.randint(1, 12),
            step=rng.randrange(20),
            priority=rng.randrange(3) if settings["policy"] == "priority" else 0,
        )
        for number in range(rng.randint(2, 12))
    ]
    return arrivals, settings


def test_the_same_steps():
    runs = [random_run(seed) for seed in range(RUNS)]
    theirs = vllm_scheduler.dry_runs(runs)
    steps = preemptions = hits = chunks = 0
    for seed, ((arrivals, settings), expected) in enumerate(zip(runs, theirs, strict=True)):
        ours = dry_run(arrivals, **settings)
        told_exception = settings["policy"] == "priority" and bool(settings["prefix_cache"])
        for mine, its in zip(ours, expected, strict=not told_exception):
            if told_exception and (mine.preempted or its.preempted):
                break  # blocks of a victim of the same step: see Scheduler._preempt
            assert mine == its, (seed, settings, arrivals)
            steps += 1
            preemptions += len(mine.preempted)
            hits += sum(mine.cached.values())
            chunks += any(count > 1 for count in mine.prefill.values()) and bool(mine.decode)
    # The runs are of use only if what they compare has happened.
    print(f"{steps} steps, {preemptions} preemptions, {hits} tokens hit, {chunks} mixed batches")
    assert steps > 5000
    assert preemptions > 300
    assert hits > 1000
    assert chunks > 500


def test_a_setting_that_the_dry_run_does_not_know_is_refused():
    with pytest.raises(TypeError, match="budget"):
        vllm_scheduler.dry_run([Arrival(id="a", prompt=3, output=1)], budget=8)


def test_what_vllm_refuses_is_told():
    with pytest.raises(
        EngineError, match=r"vLLM's Scheduler refused run: .*max_tokens must be at least 1"
    ):
        vllm_scheduler.dry_run([Arrival(id="a", prompt=3, output=0)])


def test_a_tree_is_nothing_that_vllms_scheduler_has():
    with pytest.raises(EngineError, match="'hash' or None, and not 'radix'"):
        vllm_scheduler.dry_run([Arrival(id="a", prompt=3, output=1)], prefix_cache="radix")
