"""sglang-router: which replica gets the request?

    from kvlab.engines import router, sglang

    with sglang.start("tiny-random") as a, sglang.start("tiny-random") as b:
        with router.start([a, b], policy="cache_aware") as front:
            front.generate(prompt)

It speaks SGLang's own API on both sides. "cache_aware" remembers which prompts went where and
sends one to the replica that has seen the longest beginning of it, unless load differs too much;
"round_robin" takes one after the other. Checked against sglang-router 0.3.2.

It hands its key on to whoever listens where it was told that a server is, with requests and with
its own looks at their health. So it is told to look but once, and a request is refused here when a
server's port has become another program's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from kvlab.engines.process import TOKEN, Supervised, _port_is_free
from kvlab.engines.protocol import EngineError, Prompt, checked_salt
from kvlab.engines.sglang import Native, SGLang
from kvlab.inside import token

ENVIRONMENT = "router"


def start(
    replicas: Sequence[SGLang],
    *,
    policy: Literal["cache_aware", "round_robin", "random", "power_of_two"] = "cache_aware",
    port: int | None = None,
    deadline: float = 180,
) -> Router:
    """Start a router in front of running replicas. Raises EngineError."""
    return Router(replicas, ["--policy", policy], port, deadline).start()


def start_pair(
    prefill: SGLang, decode: SGLang, *, port: int | None = None, deadline: float = 180
) -> Router:
    """Start a router in front of a running pair (`kvlab.engines.sglang_pd`). Raises EngineError."""
    # There is no other server to try: without this it would wait for the same ones again and again.
    flags = [_PAIR, "--disable-retries"]
    return Router([prefill, decode], flags, port, deadline).start()


_PAIR = "--pd-disaggregation"
_ONCE = 7 * 86_400
"""Seconds between two looks at a server's health: it takes the first when it starts."""


class Router(Native):
    """A router with its replicas as one engine; `start` and `start_pair` make one."""

    name = "sglang-router"
    _package = "sglang-router"
    _environment_name = ENVIRONMENT
    _port_names = ("http", "metrics")
    _metrics_port = "metrics"
    _metrics_prefix = "smg_"
    _health = "/readiness"

    def __init__(
        self,
        replicas: Sequence[SGLang],
        flags: list[str],
        port: int | None,
        deadline: float,
    ) -> None:
        if not replicas:
            raise EngineError("A router needs a server behind it.")
        if _PAIR in flags and any("bootstrap" not in replica.ports for replica in replicas):
            raise EngineError("A pair's servers are started with disaggregation=: see sglang_pd.")
        super().__init__(f"with {len(replicas)} servers", port=port, deadline=deadline)
        self.replicas = list(replicas)
        self._flags = flags
        self.model = replicas[0].model
        self.device = replicas[0].device
        self._vocabulary = replicas[0]._vocabulary
        self._known: list[dict[str, int]] = []
        """The servers' ports of which it was told."""

    def body(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """A request, as SGLang's. Raises EngineError for what is none, for a cache_salt, and where
        is_stale: nothing is sent then."""
        if checked_salt(options.get("cache_salt")) is not None:
            # It would be left out: all would share KV.
            raise EngineError("sglang-router 0.3.2 does not hand a cache_salt on.")
        if self.is_alive and self.is_stale:
            raise EngineError(
                f"{self.name} knows a server at a port that may be another program's by now, which "
                f"would get the request and the key. restart() the servers that have ended, then "
                f"the router."
            )
        return super().body(prompt, **options)

    def _refused(self, text: str) -> EngineError:
        error = super()._refused(text)
        ended = sum(not replica.is_alive for replica in self.replicas)
        if not ended:
            return error
        return EngineError(
            f"{error} Of the {len(self.replicas)} servers behind it {ended} have ended: restart() "
            f"them.",
            error.log,
        )

    @property
    def is_stale(self) -> bool:
        """Whether a server behind it has other ports than when it was started, or has ended and
        another program has taken its port."""
        if self._known != [replica.ports for replica in self.replicas]:
            return True
        ended = [replica for replica in self.replicas if not replica.is_alive]
        return not all(
            # Its main process may have ended before the others, which hold its port as well.
            _port_is_free(replica.port) or replica._listens(replica._begun, replica.port)
            for replica in ended
        )

    def _where(self) -> list[str]:
        if _PAIR in self._flags:
            prefill, decode = self.replicas
            where = ["--prefill", prefill.url, str(prefill.ports["bootstrap"])]
            return [*where, "--decode", decode.url]
        return ["--worker-urls", *(replica.url for replica in self.replicas)]

    def _command(self) -> list[str]:
        self._known = [dict(replica.ports) for replica in self.replicas]
        return [
            *(str(self._python), "-m", "kvlab.inside.sglang_router"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--log-level", "warn"),
            *("--health-check-interval-secs", str(_ONCE)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.ports["metrics"])),
            *self._settings(),
            *self._where(),
        ]

    def _variables(self, folder: Path) -> dict[str, str]:
        return super()._variables(folder) | {token.VARIABLE: TOKEN}

    def _check_room(self) -> None:
        for replica in self.replicas:
            replica.need()

    def _is_ready(self, run: Supervised) -> bool:
        # By itself it is ready with the first server that it has found healthy.
        if not super()._is_ready(run):
            return False
        return bool(self._get(self._health)["healthy_workers"] == len(self.replicas))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV of all servers behind it; False if one of them is busy."""
        done = [replica.reset_prefix_cache() for replica in self.replicas]
        return all(done)
