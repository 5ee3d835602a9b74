"""Prefill in one vLLM, decode in another: KV goes from memory to memory through NIXL.

    from kvlab.engines import vllm_pd

    with vllm_pd.start("tiny-random") as pair:
        print(pair.generate([5, 6, 7] * 100, max_tokens=8).token_ids)
        print(pair.decode.counters())

The client carries the handoff: it sends the prompt to the prefill side with max_tokens 1, gets
back where the KV lies, and sends both to the decode side, which fetches the KV and goes on.
Checked against vLLM 0.32.0 (distributed/kv_transfer/kv_connector/v1/nixl).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, overload

from kvlab.engines import vllm
from kvlab.engines.pair import Pair, refuse_port
from kvlab.engines.protocol import Chunk, Completion, EngineError, Prompt, Prompts, complete, only
from kvlab.engines.vllm import VLLM
from kvlab.engines.vllm_connectors import over_nixl

# What the prefill side is asked to do; it fills in the rest.
_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def start(model: str | Path = "smollm2-135m", **settings: Any) -> VLLMPair:
    """Start two servers; `settings` are those of `vllm.start`, the same for both.

    Raises what `vllm.start` raises; nothing is left then.
    """
    refuse_port(settings)
    with contextlib.ExitStack() as started:
        prefill = vllm.start(model, connector=over_nixl("kv_producer"), **settings)
        started.enter_context(prefill)
        decode = vllm.start(model, connector=over_nixl("kv_consumer"), **settings)
        started.pop_all()
    return VLLMPair(prefill, decode)


class VLLMPair(Pair[VLLM]):
    """A prefill and a decode server as one engine; `start` makes one."""

    name = "vLLM pair"

    def _handed_over(self, prompt: Prompt, options: dict[str, Any]) -> dict[str, Any]:
        """Prefill the prompt; the decode side's request, with where its KV lies."""
        body = self.decode.body(prompt, **options)
        answer = self.prefill.ask(body | {"max_tokens": 1, "kv_transfer_params": _PREFILL})
        if not answer.get("kv_transfer_params"):
            raise EngineError("The prefill side said nothing of its KV.", self.prefill.log)
        return body | {"kv_transfer_params": answer["kv_transfer_params"]}

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, **options: Any) -> list[Completion]: ...
    def generate(self, prompt: Prompt | Prompts, **options: Any) -> Completion | list[Completion]:
        """Complete one prompt, or several at the same time; options as `VLLM.generate` has them.

        cached_tokens is what the *prefill* side found in its own cache: the handoff carries that
        figure over, and the decode side repeats it (0.32.0, vllm/v1/engine/output_processor.py).
        What the decode side found or took over, its metrics say.
        """
        return complete(
            prompt,
            lambda one: self.decode.completion(self.decode.ask(self._handed_over(one, options))),
        )

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Chunk]:
        """Complete one prompt and yield what comes as it comes; all of it from the decode side."""
        yield from self.decode.stream_of(self._handed_over(only(prompt), options))
