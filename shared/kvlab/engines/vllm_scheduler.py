"""vLLM's own Scheduler on the requests of a dry run, beside minikv's.

    from kvlab.engines import vllm_scheduler
    from minikv.trace import Arrival, dry_run

    requests = [Arrival(id="a", prompt=300, output=4), Arrival(id="b", prompt=20, output=4)]
    assert vllm_scheduler.dry_run(requests) == dry_run(requests)

No server and no model: the class is imported in vLLM's environment, given the requests,
and asked for one step after another (`kvlab.inside.vllm_scheduler`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from kvlab import models
from kvlab.engines.protocol import EngineError
from kvlab.engines.worker import Worker
from minikv import trace
from minikv.trace import Arrival, Step, made_up_prompts

SECONDS = 300
"""Longest that one dry run may take."""


class SchedulerWorker(Worker):
    """A process that holds vLLM's Scheduler class."""

    name = "vLLM's Scheduler"
    _program = "vllm_scheduler"
    _environment_name = "vllm"


def dry_run(arrivals: Sequence[Arrival], **settings: Any) -> list[Step]:
    """The steps that vLLM's Scheduler takes; arguments as those of `minikv.trace.dry_run`.

    Raises EngineError with vLLM's own words, or kvlab.environments.EnvironmentMissing.
    """
    return dry_runs([(arrivals, settings)])[0]


def dry_runs(many: Sequence[tuple[Sequence[Arrival], dict[str, Any]]]) -> list[list[Step]]:
    """Several dry runs, each of its requests and settings, in one process."""
    model = str(models.get("tiny-random"))
    found = []
    with SchedulerWorker() as scheduler:
        for arrivals, settings in many:
            asked = {
                "model": model,
                "settings": _all_settings(settings),
                "arrivals": [
                    {
                        "id": arrival.id,
                        # vLLM would take numbers below 0 for no tokens: any that differ do.
                        "prompt": [token % 2**31 for token in prompt],
                        "output": arrival.output,
                        "step": arrival.step,
                        "priority": arrival.priority,
                    }
                    for arrival, prompt in zip(arrivals, made_up_prompts(arrivals), strict=True)
                ],
            }
            scheduler.start()  # after the settings were looked at; it goes on running
            found.append(scheduler.call("run", timeout=SECONDS, **asked))
    return [[_step(step) for step in answer] for answer in found]


def _all_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with the defaults of minikv's dry run; TypeError for one it does not know."""
    call = inspect.signature(trace.dry_run).bind([], **given)
    call.apply_defaults()
    if call.kwargs["prefix_cache"] not in ("hash", None):
        raise EngineError(
            "vLLM finds cached blocks by their hashes: prefix_cache is 'hash' or None, and not "
            f"{call.kwargs['prefix_cache']!r}."
        )
    return call.kwargs


def _step(found: dict[str, Any]) -> Step:
    return Step(
        **found
        | {
            "preempted": tuple(found["preempted"]),
            "waiting": tuple(found["waiting"]),
            "blocks": {name: tuple(ids) for name, ids in found["blocks"].items()},
        }
    )
