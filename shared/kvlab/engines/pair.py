"""Prefill and decode on two servers: what the pairs of vLLM and of SGLang have in common."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

from kvlab.engines.generating import GeneratingServer
from kvlab.engines.protocol import EngineError

S = TypeVar("S", bound=GeneratingServer)


def refuse_port(settings: dict[str, Any]) -> None:
    """Raise EngineError for the one setting that two servers cannot share."""
    if "port" in settings:
        raise EngineError("Two servers cannot share one port: leave out port=.")


class Pair(Generic[S]):
    """Two servers that are started and stopped together."""

    def __init__(self, prefill: S, decode: S) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def is_alive(self) -> bool:
        return self.prefill.is_alive and self.decode.is_alive

    def metrics(self) -> dict[str, float]:
        """The metrics of both sides, each name with the side before it: "decode vllm:..."."""
        return {
            f"{side} {name}": value
            for side, server in (("prefill", self.prefill), ("decode", self.decode))
            for name, value in server.metrics().items()
        }

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV on both sides; False if one of them is busy."""
        done = self.prefill.reset_prefix_cache()
        return self.decode.reset_prefix_cache() and done

    def start(self) -> Self:
        """Start what does not run; if one of them fails, none runs."""
        try:
            self.prefill.start()
            self.decode.start()
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def stop(self) -> None:
        self.decode.stop()
        self.prefill.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
