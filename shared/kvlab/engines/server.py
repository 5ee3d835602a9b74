"""A system that is spoken to over HTTP on a loopback port."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvlab.engines.process import TOKEN, Supervised, System, telling_lines
from kvlab.engines.protocol import EngineError


class Server(System):
    """A system that answers HTTP. It is ready when GET `_health` answers 200."""

    name = "server"
    _health = "/health"
    _fatal = ""
    """What it says while it still answers, though an inner process of it has died."""
    _metrics_port = "http"
    """Which of its ports has the page of counters, GET /metrics."""
    _metrics_prefix = ""
    """How the names of its own counters begin."""

    def __init__(self, of: str = "", *, port: int | None = None, deadline: float = 300) -> None:
        super().__init__(of, port=port, deadline=deadline)
        self._client: httpx.Client | None = None

    @property
    def port(self) -> int:
        """The port that start(port=...) chooses; `ports` has all of them."""
        return self.ports[self._port_names[0]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    # What System asks for.

    def _connect(self, run: Supervised) -> None:
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            # A dead server does not have to be waited for: its connection breaks at once. A frozen
            # one is known by its silence.
            timeout=httpx.Timeout(120, connect=5),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # no proxy between here and the loopback
        )

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _is_ready(self, run: Supervised) -> bool:
        # Whoever listens gets the token: first see that it is this very run.
        with contextlib.suppress(httpx.HTTPError):
            return (
                self._listens(run, self.ports["http"])
                and self._http.get(self._health, timeout=2).status_code == 200
            )
        return False

    # Talking to it.

    @property
    def _http(self) -> httpx.Client:
        if self._client is None:
            raise EngineError(f"{self.name} is stopped. Start it again with restart().")
        return self._client

    @contextlib.contextmanager
    def _talking(self) -> Iterator[httpx.Client]:
        """The HTTP client; turns what goes wrong on the way into an EngineError."""
        client = self._http
        if not self.is_alive:  # who listens on its port now must not get the token
            raise self._ended("ended while it was asked")
        try:
            yield client
        except httpx.TimeoutException as slow:
            if not self.is_alive:
                raise self._ended("ended while it was asked") from None
            raise EngineError(
                f"{self.name} runs but gave no answer in time ({type(slow).__name__}). "
                f"restart() starts it anew. Its log: {self.log}",
                self.log,
            ) from None
        except EngineError:
            raise
        except RuntimeError as error:  # httpx's, where stop() in another thread has closed it
            if client.is_closed:
                raise EngineError(f"{self.name} was stopped while it was asked.") from error
            raise
        except httpx.TransportError as error:
            if self._has_ended():
                raise self._ended("ended while it was asked") from None
            raise EngineError(
                f"{self.name} broke off the connection ({error}). Its log: {self.log}", self.log
            ) from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        """The response if it is a good one; else raises what the server said."""
        if response.status_code < 400:
            return response
        response.read()
        raise self._refused(response.text)

    def _refused(self, text: str) -> EngineError:
        """The error for what a server answered in place of a result."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(text)["error"]
            text = error["message"] if isinstance(error, dict) else str(error)
        if not self.is_alive:
            return self._ended("ended while it was asked")
        if self._fatal and self._fatal in text:
            log = self.log
            self.stop()  # what still answers cannot serve any more
            lines = [text, *telling_lines(log, start=self._begun.quiet)]
            return EngineError(
                f"{self.name} lost an inner process and was stopped. It said:"
                + "".join(f"\n  {line}" for line in lines)
                + f"\nrestart() starts it anew. Its log: {log}",
                log,
            )
        clear = self._explain(text)
        return EngineError(
            f"{self.name} refused: {text}" + (f" {clear}" if clear else ""), self.log
        )

    def _get(self, path: str, **query: Any) -> Any:
        """What GET gives, as JSON."""
        with self._talking() as http:
            return self._checked(http.get(path, params=query)).json()

    # Counters.

    def metrics(self) -> dict[str, float]:
        """Its counters and gauges of now, by their names.

        Labels that are the same for every sample (model_name, tp_rank) are left out; others are
        written behind the name as Prometheus does: 'x_total{finished_reason="length"}'.
        Of a histogram its _sum and _count are there, not its buckets.
        """
        return {
            name + _written(labels): value
            for name, labels, value in self._samples()
            if "le" not in labels and not name.endswith(("_created", "_info"))
        }

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        url = f"http://127.0.0.1:{self.ports[self._metrics_port]}/metrics"
        with self._talking() as http:
            text = self._checked(http.get(url, follow_redirects=True)).text
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(self._metrics_prefix)
        ]


# One model and one process of each kind: vLLM's labels, then SGLang's.
_SAME_FOR_ALL = {"model_name", "engine", "engine_type", "moe_ep_rank", "pp_rank", "tp_rank"}


def _written(labels: dict[str, str]) -> str:
    rest = {key: value for key, value in labels.items() if key not in _SAME_FOR_ALL}
    return "{" + ",".join(f'{key}="{rest[key]}"' for key in sorted(rest)) + "}" if rest else ""
