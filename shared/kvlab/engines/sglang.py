"""SGLang's server as an engine, with its radix tree and, where wanted, HiCache's tiers below.

    from kvlab.engines import sglang

    with sglang.start("smollm2-135m") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)
        print(engine.cached_by_tier("The capital of France is"))

Checked against SGLang 0.5.23 (srt/entrypoints/http_server.py, srt/managers/io_struct.py and
srt/arg_groups/fields). On a CPU the same wheel runs with stand-ins for a few copy kernels that
exist for CUDA only (kvlab/inside/sglang_cpu): scheduler, radix tree and tiers are the real ones,
speed says nothing.

It listens on loopback alone, and asks for a token. Two exceptions: with a Mooncake Store below it,
and as one side of a pair, Mooncake's Transfer Engine listens on all interfaces
(`kvlab.engines.transfer_engine`).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from kvlab import models
from kvlab.engines import room
from kvlab.engines.generating import GeneratingServer
from kvlab.engines.mooncake import Master
from kvlab.engines.process import TOKEN
from kvlab.engines.protocol import (
    Chunk,
    Completion,
    EngineError,
    Prompt,
    checked_salt,
    whole,
)
from kvlab.inside import token

ENVIRONMENT = "sglang"

_OVERHEAD = 2 << 30
"""Bytes of main memory that its three processes take on a CPU besides weights and KV."""
_STATIC = 0.6
"""Which part of the memory that is free at the start weights and KV may take on a CPU. Whatever
else starts meanwhile counts as taken, too."""


@dataclass(frozen=True)
class HiCache:
    """Tiers below the radix tree of the device: L2 in host memory, and L3 if one is named."""

    ratio: float = 2.0
    """Tokens of L2 for each token of the device."""
    folder: str | Path | None = None
    """L3 in files of this folder, which stay."""
    master: Master | None = None
    """L3 in a Mooncake Store; SGLang lends it `segment_bytes`."""
    segment_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raises EngineError for what is no tier."""
        if not isinstance(self.ratio, (int, float)) or not 0 < self.ratio < math.inf:
            raise EngineError(f"ratio is a number above 0, and not {self.ratio!r:.80}.")
        if not isinstance(self.folder, (str, Path, NoneType)):
            raise EngineError(f"folder is a path, or None, and not {self.folder!r:.80}.")
        if not isinstance(self.master, (Master, NoneType)):
            raise EngineError(f"master is what mooncake.start() gives: not {self.master!r:.80}.")
        if self.folder is not None and self.master is not None:
            raise EngineError("HiCache has one L3: a folder or a Mooncake Store.")
        whole("segment_bytes", self.segment_bytes)


@dataclass(frozen=True)
class Tiers:
    """Where the cached tokens of a prompt came from."""

    device: int
    host: int
    storage: int


class Native(GeneratingServer):
    """What speaks SGLang's own POST /generate: SGLang, and the router in front of it."""

    _path = "/generate"
    _vocabulary = 0
    """Token ids of the model lie below."""

    def body(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        cache_salt: str | None = None,
        logprobs: bool = True,
    ) -> dict[str, Any]:
        """A request to /generate. Raises EngineError for what is no request."""
        if seed is not None:  # it would be taken, and make no difference
            raise EngineError(
                f"{self.name} heeds a seed only with --enable-deterministic-inference, which the "
                "course does not use. With temperature 0 its answers repeat."
            )
        sampling: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop": self._stop_strings(stop),
            "ignore_eos": ignore_eos,
        }
        body: dict[str, Any] = {"sampling_params": sampling, "return_logprob": logprobs}
        if not prompt:  # as below
            raise EngineError(f"{self.name} refused: the prompt is empty.")
        if isinstance(prompt, str):
            body["text"] = prompt
        else:
            body["input_ids"] = tokens = [operator.index(token) for token in prompt]
            wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
            if wrong:  # SGLang 0.5.23 would take it, and its scheduler would end
                raise EngineError(
                    f"{self.name} refused: token {wrong[0]} is none of the {self._vocabulary} of "
                    f"{self.model}."
                )
        if checked_salt(cache_salt) is not None:
            body["cache_salt"] = cache_salt
        return self._sendable(body)

    def completion(self, answer: dict[str, Any]) -> Completion:
        found = self._not_aborted(answer["meta_info"])
        token_ids, logprobs = _tokens(answer)
        return Completion(
            text=answer["text"],
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_tokens=found["prompt_tokens"],
            cached_tokens=found["cached_tokens"],
            finish_reason=found["finish_reason"]["type"],
        )

    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
        for event in events:
            found, (token_ids, logprobs) = self._not_aborted(event["meta_info"]), _tokens(event)
            end: dict[str, Any] = {}
            if found["finish_reason"] is not None:
                end = {
                    "finish_reason": found["finish_reason"]["type"],
                    "prompt_tokens": found["prompt_tokens"],
                    "cached_tokens": found["cached_tokens"],
                }
            yield Chunk(event["text"], token_ids, logprobs, **end)

    def _not_aborted(self, found: dict[str, Any]) -> dict[str, Any]:
        """SGLang says in an answer like any other that it gave a request up. Raises EngineError."""
        end = found["finish_reason"]
        if end is not None and end["type"] == "abort":
            raise self._refused(str(end.get("message") or "the request was aborted"))
        return found


def _tokens(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of the new tokens; the latter come as [logprob, id, text]."""
    triples = answer["meta_info"].get("output_token_logprobs") or []
    return answer["output_ids"], [triple[0] for triple in triples]


def start(
    model: str | Path = "smollm2-135m",
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    page_size: int = 16,
    max_total_tokens: int = 2048,
    max_model_len: int = 1024,
    chunked_prefill_size: int = 1024,
    max_running_requests: int = 16,
    hicache: HiCache | None = None,
    disaggregation: Literal["prefill", "decode"] | None = None,
    port: int | None = None,
    deadline: float = 600,
    extra_args: Sequence[str] = (),
) -> SGLang:
    """Start SGLang on this machine's CPU or GPU and return it when it is ready.

    `model` is a name that `kvlab.models.get` knows, or a folder. The other arguments are SGLang's
    flags of the same name (max_model_len: --context-length); they are always passed, so that what
    an engine counts is the same on a CPU and on a GPU. The KV pool of the device has
    max_total_tokens tokens, in pages of page_size. `disaggregation` makes it one side of a pair:
    see `kvlab.engines.sglang_pd`. `deadline` is in seconds.

    Raises EngineError, kvlab.models.ModelError if no model has that name or it cannot be had,
    kvlab.environments.EnvironmentMissing if SGLang is not installed.
    """
    return SGLang(
        model,
        dtype=dtype,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        max_model_len=max_model_len,
        chunked_prefill_size=chunked_prefill_size,
        max_running_requests=max_running_requests,
        hicache=hicache,
        disaggregation=disaggregation,
        port=port,
        deadline=deadline,
        extra_args=extra_args,
    ).start()


_SETTINGS = "settings.yaml"
_HANDOFF = "30"
"""Seconds that one side of a pair waits for the other, which is on this machine."""
# What SGLang's error lines mean.
_SENTENCES = (
    (
        r"Not enough memory|CUDA out of memory",
        "Memory is too little: stop other engines and kernels, or give a smaller max_total_tokens.",
    ),
    (
        r"ModuleNotFoundError: No module named",
        "SGLang's environment is damaged: `.venv/bin/kvlab engines remove sglang`, then "
        "`.venv/bin/kvlab engines install sglang`.",
    ),
    (r"unrecognized arguments", "This SGLang does not know a flag that it was given."),
)


class SGLang(Native):
    """An SGLang server; `start` makes one. Its processes end with stop() or its `with` block."""

    name = "SGLang"
    _package = "sglang"
    _environment_name = ENVIRONMENT
    grace = 4.0  # by itself it takes 6 to 17 s, to look at a GPU that it may not have
    _metrics_prefix = "sglang:"
    _sentences = _SENTENCES

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str,
        page_size: int,
        max_total_tokens: int,
        max_model_len: int,
        chunked_prefill_size: int,
        max_running_requests: int,
        hicache: HiCache | None,
        disaggregation: str | None,
        port: int | None,
        deadline: float,
        extra_args: Sequence[str],
    ) -> None:
        super().__init__(port=port, deadline=deadline)
        for name, size in {
            "page_size": page_size,
            "max_total_tokens": max_total_tokens,
            "max_model_len": max_model_len,
            "chunked_prefill_size": chunked_prefill_size,
            "max_running_requests": max_running_requests,
        }.items():
            whole(name, size)
        if hicache is not None and not isinstance(hicache, HiCache):
            raise EngineError(f"hicache is a sglang.HiCache(...), and not {hicache!r:.80}.")
        if disaggregation not in (None, "prefill", "decode"):
            raise EngineError(
                f"disaggregation is prefill, decode or None, and not {disaggregation!r:.80}."
            )
        self._loads(model, dtype, extra_args)
        self._kv_bytes = room.kv_bytes(self.folder, dtype, max_total_tokens)
        self._vocabulary = int(models.config(self.folder)["vocab_size"])
        self._hicache = hicache
        self._moves = False
        """Whether each start is at other ports."""
        self._flags = [
            *("--dtype", dtype),
            *("--page-size", str(page_size)),
            *("--max-total-tokens", str(max_total_tokens)),
            *("--context-length", str(max_model_len)),
            *("--chunked-prefill-size", str(chunked_prefill_size)),
            *("--max-running-requests", str(max_running_requests)),
            *("--schedule-policy", "fcfs"),  # as vLLM's
            *("--random-seed", "0"),
            "--enable-metrics",
            "--enable-cache-report",  # cached_tokens in the answers
            "--incremental-streaming-output",
            # On by default on a GPU; it shifts what a step schedules.
            "--disable-overlap-schedule",
            "--sleep-on-idle",  # else an idle scheduler keeps a core busy
            "--skip-server-warmup",  # its requests would be in the cache, and in the counts
        ]
        if self.device == "cpu":
            self._flags += [
                *("--device", "cpu"),
                *("--attention-backend", "torch_native"),
                *("--mem-fraction-static", str(_STATIC)),
            ]
        if disaggregation is not None:
            # A prefill side tells there where its KV lies.
            self._port_names = ("http", "bootstrap")
            self._moves = disaggregation == "prefill"
            self._flags += ["--disaggregation-mode", disaggregation]
            self._flags += ["--disaggregation-transfer-backend", "mooncake_tcp"]
            if disaggregation == "decode" and self.device == "cpu":
                # Where it keeps a request's KV that its pool has no room for: the default is
                # HiCache's pool by a kernel for CUDA.
                self._flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]

    # What System asks for.

    def _start(self) -> None:
        if self._moves:
            # What a decode side was told at a bootstrap address it keeps until two looks, 5 s
            # apart, find nobody there (0.5.23, srt/disaggregation/common/conn.py). A prefill side
            # that is back sooner at the same address would wait in vain for what the decode side
            # has told the one before.
            self.ports = {}
        super()._start()

    def _check_room(self) -> None:
        if self._hicache is not None and self._hicache.master is not None:
            self._hicache.master.need()
        parts = {}
        if self.device == "cpu":
            static = self._weights + self._kv_bytes
            spare = max(_OVERHEAD, round(static / _STATIC) - static)
            parts = {"weights": self._weights, "KV pool": self._kv_bytes, "besides": spare}
        if self._hicache is not None:
            parts["host tier"] = round(self._kv_bytes * self._hicache.ratio)
            if self._hicache.master is not None:
                parts["lent to the store"] = self._hicache.segment_bytes
        room.check(self.name, parts, "give a smaller max_total_tokens or a smaller model")

    def _command(self) -> list[str]:
        ports = []
        if "bootstrap" in self.ports:
            ports = ["--disaggregation-bootstrap-port", str(self.ports["bootstrap"])]
        return [
            *(str(self._python), "-m", "kvlab.inside.sglang_launch", "--config", _SETTINGS),
            *("--model-path", str(self.folder), "--served-model-name", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *ports,
            *self._settings(),
        ]

    def _settings(self) -> list[str]:
        tiers = [] if self._hicache is None else _tiers(self._hicache)
        return [*tiers, *super()._settings()]

    def _variables(self, folder: Path) -> dict[str, str]:
        # In a file that only this user can read: everybody sees a command line.
        (folder / _SETTINGS).write_text(f'api-key: "{TOKEN}"\n')
        env = super()._variables(folder) | {
            "SGLANG_HOST_IP": "127.0.0.1",  # for the sockets between its processes
            # Else torch opens a port for its process group, on all interfaces.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder / 'rendezvous'}",
            # GET /health would generate a token, which the counters count.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            token.VARIABLE: TOKEN,  # so that its log can leave it out
            # Log-probabilities before the temperature, as the other engines give them.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        }
        if self.device == "cpu":
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        if "bootstrap" in self._port_names:
            # How long one side waits for the other; for 300 s by default.
            env["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = _HANDOFF
            env["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] = _HANDOFF
        if self._hicache is not None and self._hicache.folder is not None:
            place = str(Path(self._hicache.folder).expanduser().absolute())
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = place
        return env

    # The engine.

    def cached_by_tier(self, prompt: Prompt, **options: Any) -> Tiers:
        """Complete a prompt, and say from which tier its cached tokens came."""
        found = self.ask(self.body(prompt, **options))["meta_info"]
        details = found.get("cached_tokens_details") or {"device": found["cached_tokens"]}
        return Tiers(
            device=int(details.get("device", 0)),
            host=int(details.get("host", 0)),
            storage=int(details.get("storage", 0)),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV of device and host. Returns False, and forgets none, while
        requests run or wait. What is in storage (L3) stays."""
        with self._talking() as http:
            return http.post("/flush_cache").status_code == 200


def _tiers(hicache: HiCache) -> list[str]:
    flags = [
        "--enable-hierarchical-cache",
        *("--hicache-ratio", str(hicache.ratio)),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "page_first_direct"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
    ]
    if hicache.folder is not None:
        flags += ["--hicache-storage-backend", "file"]
    if hicache.master is not None:
        extra = {
            "master_server_address": hicache.master.address,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": hicache.segment_bytes,
            "protocol": "tcp",
            "device_name": "",
        }
        flags += ["--hicache-storage-backend", "mooncake"]
        flags += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
    return flags
