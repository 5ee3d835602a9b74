"""Prefill in one SGLang, decode in another: KV goes between them by Mooncake's Transfer Engine.

    from kvlab.engines import sglang_pd

    with sglang_pd.start("tiny-random") as pair:
        print(pair.generate([5, 6, 7] * 100, max_tokens=8).token_ids)

The router carries the handoff: it sends each request to both sides at once, with a number that
names it, its *bootstrap room*. The decode side takes room for the KV and asks the prefill side's
bootstrap server where to meet; the prefill side computes, and writes the KV into that room.
Checked against SGLang 0.5.23 (srt/disaggregation) and sglang-router 0.3.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self, overload

from kvlab.engines import router, sglang
from kvlab.engines.pair import Pair, refuse_port
from kvlab.engines.protocol import Chunk, Completion, Prompt, Prompts
from kvlab.engines.router import Router
from kvlab.engines.sglang import SGLang


def start(model: str | Path = "smollm2-135m", **settings: Any) -> SGLangPair:
    """Start two servers and a router; `settings` are those of `sglang.start`, the same for both.

    Between the two the Transfer Engine listens on all interfaces. Raises what `sglang.start`
    raises; nothing is left then.
    """
    refuse_port(settings)
    with contextlib.ExitStack() as started:
        prefill = sglang.start(model, disaggregation="prefill", **settings)
        started.enter_context(prefill)
        decode = sglang.start(model, disaggregation="decode", **settings)
        started.enter_context(decode)
        front = router.start_pair(prefill, decode)
        started.pop_all()
    return SGLangPair(prefill, decode, front)


class SGLangPair(Pair[SGLang]):
    """A prefill and a decode server behind a router as one engine; `start` makes one."""

    name = "SGLang pair"

    def __init__(self, prefill: SGLang, decode: SGLang, front: Router) -> None:
        super().__init__(prefill, decode)
        self.front = front

    @property
    def is_alive(self) -> bool:
        return super().is_alive and self.front.is_alive

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, **options: Any) -> list[Completion]: ...
    def generate(self, prompt: Prompt | Prompts, **options: Any) -> Completion | list[Completion]:
        """Complete one prompt, or several at the same time; options as in `SGLang.generate`."""
        self._make_ready()
        return self.front.generate(prompt, **options)

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Chunk]:
        """Complete one prompt and yield what comes as it comes."""
        self._make_ready()
        yield from self.front.stream(prompt, **options)

    def _make_ready(self) -> None:
        """Raise EngineError if a side has ended, for the router would try for half a minute; start
        the router anew if a side was."""
        self.prefill.need()
        self.decode.need()
        if self.front.is_stale:
            self.front.restart()

    def start(self) -> Self:
        super().start()
        if self.front.is_stale:
            self.front.stop()
        try:
            self.front.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self.front.stop()
        super().stop()
