"""sglang-router: which replica gets the request?

    from kvlab.engines import router, sglang

    with sglang.start("tiny-random") as a, sglang.start("tiny-random") as b:
        with router.start([a, b], policy="cache_aware") as front:
            front.generate(prompt)

It speaks SGLang's own API on both sides. "cache_aware" remembers which prompts went where and
sends one to the replica that has seen the longest beginning of it, unless load differs too much;
"round_robin" takes one after the other. `start_pair` puts it in front of a prefill and a decode
server. Checked against sglang-router 0.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from kvlab import environments, paths
from kvlab.engines import sglang
from kvlab.engines.process import TOKEN
from kvlab.engines.protocol import EngineError
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
    where = ["--worker-urls", *(replica.url for replica in replicas)]
    return Router(replicas, [*where, "--policy", policy], port, deadline).start()


def start_pair(
    model: str | Path = "smollm2-135m",
    *,
    port: int | None = None,
    deadline: float = 180,
    **settings: Any,
) -> Router:
    """Start a prefill server, a decode server and a router in front of them.

    KV goes from one to the other over TCP, by Mooncake's Transfer Engine. `settings` are those of
    `sglang.start`, the same for both. The router stops them when it is stopped.
    """
    prefill = sglang.start(model, disaggregation="prefill", **settings)
    try:
        decode = sglang.start(model, disaggregation="decode", **settings)
        try:
            where = ["--pd-disaggregation", "--prefill", prefill.url]
            where += [str(prefill.ports["bootstrap"]), "--decode", decode.url]
            return Router([prefill, decode], where, port, deadline, owns=True).start()
        except BaseException:
            decode.stop()
            raise
    except BaseException:
        prefill.stop()
        raise


class Router(Native):
    """A router with its replicas as one engine; `start` and `start_pair` make one."""

    name = "sglang-router"
    _port_names = ("http", "metrics")
    _metrics_port = "metrics"
    _metrics_prefix = "smg_"
    _health = "/readiness"

    def __init__(
        self,
        replicas: Sequence[SGLang],
        where: list[str],
        port: int | None,
        deadline: float,
        owns: bool = False,
    ) -> None:
        super().__init__(f"with {len(replicas)} servers", port=port, deadline=deadline)
        self._python = environments.python(ENVIRONMENT)
        self.replicas = list(replicas)
        """The servers behind it; of a pair the prefill side comes first."""
        self._where = where
        self._owns = owns

    def _command(self) -> list[str]:
        return [
            *(str(self._python), "-m", "kvlab.inside.sglang_router"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self.ports["metrics"])),
            *self._where,
        ]

    def _environment(self, folder: Path) -> dict[str, str]:
        return environments.clean_variables(ENVIRONMENT, self._python) | {
            "TMPDIR": str(folder),
            token.VARIABLE: TOKEN,
            "PYTHONPATH": str(paths.ROOT / "shared"),  # kvlab.inside
        }

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV of all servers behind it; False if one of them is busy."""
        done = [replica.reset_prefix_cache() for replica in self.replicas]
        return all(done)

    def restart(self) -> Self:
        """Start anew, the servers of a pair too."""
        self.stop()
        if self._owns:
            raise EngineError("A pair is not restarted: start another one.")
        return self.start()

    def stop(self) -> None:
        super().stop()
        if self._owns:
            for replica in self.replicas:
                replica.stop()
