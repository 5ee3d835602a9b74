"""minikv behind the same calls as the engines that run in processes of their own.

    from kvlab.engines import minikv

    with minikv.start("smollm2-135m") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)

It runs in the notebook's own process: `engine.llm` is the `minikv.LLM`, with all its rooms to look
into. Several prompts are one batch. A chapter that only needs minikv uses `minikv.LLM` itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Literal, Self, Unpack, cast, overload

from kvlab import models
from kvlab.engines.protocol import (
    Chunk,
    Completion,
    EngineError,
    Options,
    Prompt,
    Prompts,
    checked_salt,
    is_one,
)
from minikv import LLM, RequestOutput, SamplingParams
from minikv.request import Piece
from minikv.scheduler import PrefixCache


def start(
    model: str | Path = "smollm2-135m",
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    block_size: int = 32,
    kv_cache_memory_bytes: int = 64 << 20,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 1024,
    max_num_seqs: int = 16,
    prefix_cache: PrefixCache | None = "hash",
) -> MiniKV:
    """Load a model into minikv. Arguments and defaults are those of `kvlab.engines.vllm.start`,
    but for `prefix_cache`: "hash", "radix" or None, see `minikv.LLM`.

    Raises EngineError where minikv says that something does not fit, and
    kvlab.models.ModelError if no model has that name.
    """
    return MiniKV(
        models.folder(model),
        dtype=dtype,
        block_size=block_size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        prefix_cache=prefix_cache,
    ).restart()


class MiniKV:
    """minikv as an engine; `start` makes one."""

    name = "minikv"

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        """The `minikv.LLM` itself. Raises EngineError when stopped."""
        if self._llm is None:
            raise EngineError("minikv is stopped. Start it again with restart().")
        return self._llm

    @property
    def is_alive(self) -> bool:
        return self._llm is not None

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Completion]: ...
    def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several as one batch. Raises EngineError."""
        one = is_one(prompt)
        with _plainly():
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)
            prompts = cast(list[Prompt], [prompt] if one else prompt)
            outputs = self.llm.generate(prompts, params, cache_salt=checked_salt(cache_salt))
        completions = [_completion(output) for output in outputs]
        return completions[0] if one else completions

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Generator[Chunk]:
        """Complete one prompt and yield each token when it is there. Closing it aborts."""
        if not is_one(prompt):
            raise EngineError("stream() takes one prompt; generate() takes several.")
        with _plainly():
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)
            pieces = self.llm.stream(prompt, params, cache_salt=checked_salt(cache_salt))
            for p in pieces:
                end = {} if p.finish_reason is None else _end(p)
                yield Chunk(p.text, p.token_ids, p.logprobs, p.finish_reason, **end)

    def metrics(self) -> dict[str, float]:
        """minikv's counts since it was started, such as "minikv:token_forwards_total"."""
        stats = dataclasses.asdict(self.llm.stats)
        peak = stats.pop("peak_blocks")  # not a count of events
        return {f"minikv:{name}_total": count for name, count in stats.items()} | {
            "minikv:peak_blocks": peak
        }

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. Returns False, and forgets none, while requests hold any."""
        return self.llm.reset_prefix_cache()

    def restart(self) -> Self:
        """Load the model anew, with an empty cache and counts of 0."""
        self.stop()
        with _plainly():
            self._llm = LLM(self._folder, **self._settings)
        return self

    def stop(self) -> None:
        """Give weights and KV cache back."""
        self._llm = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """minikv's own errors as those of the protocol."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise EngineError(f"minikv refused: {error}") from error


def _end(piece: Piece) -> dict[str, int]:
    """What only the last chunk of a stream tells."""
    return {"prompt_tokens": piece.prompt_tokens, "cached_tokens": piece.cached_tokens}


def _completion(output: RequestOutput) -> Completion:
    assert output.finish_reason is not None
    return Completion(
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=output.cached_tokens,
        finish_reason=output.finish_reason,
    )
