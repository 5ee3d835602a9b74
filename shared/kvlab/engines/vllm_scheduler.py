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
import json
import subprocess
from collections.abc import Sequence
from typing import Any

from kvlab import environments, models, paths
from kvlab.engines.base import EngineError
from kvlab.engines.vllm import clean_environment
from kvlab.install import die_with_parent
from minikv import trace
from minikv.trace import Arrival, Step, made_up_prompts

SECONDS = 300


def dry_run(arrivals: Sequence[Arrival], **settings: Any) -> list[Step]:
    """The steps that vLLM's Scheduler takes; arguments as those of `minikv.trace.dry_run`.

    Raises EngineError with vLLM's own words, or kvlab.environments.EnvironmentMissing.
    """
    return dry_runs([(arrivals, settings)])[0]


def dry_runs(many: Sequence[tuple[Sequence[Arrival], dict[str, Any]]]) -> list[list[Step]]:
    """Several dry runs, each of its requests and settings, in one process."""
    python = environments.python("vllm")
    model = str(models.get("tiny-random"))
    lines = []
    for arrivals, settings in many:
        prompts = made_up_prompts(arrivals)
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
                for arrival, prompt in zip(arrivals, prompts, strict=True)
            ],
        }
        lines.append(json.dumps(asked))
    done = subprocess.run(
        [str(python), "-m", "kvlab.inside.vllm_scheduler"],
        input="\n".join(lines),
        env=clean_environment(python) | {"PYTHONPATH": str(paths.ROOT / "shared")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        preexec_fn=die_with_parent,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(many):
        said = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise EngineError(f"vLLM's Scheduler ended with code {done.returncode}:\n  {said}")
    for answer in answers:
        if isinstance(answer, dict):
            raise EngineError(f"vLLM's Scheduler refused: {answer['error']}")
    return [[_step(step) for step in answer] for answer in answers]


def _all_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings with the defaults of minikv's dry run; TypeError for one it does not know."""
    call = inspect.signature(trace.dry_run).bind([], **given)
    call.apply_defaults()
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
