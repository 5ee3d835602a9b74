"""vLLM's OpenAI server as an engine.

    from kvlab.engines import vllm

    with vllm.start("smollm2-135m") as engine:
        print(engine.generate("The capital of France is", max_tokens=8).text)

Checked against vLLM 0.32.0. What is said here of its flags, fields and metrics can be read there
in vllm/engine/arg_utils.py, vllm/entrypoints/openai/completion/protocol.py and
vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import zmq

from kvlab.engines import room
from kvlab.engines.generating import GeneratingServer, without_places
from kvlab.engines.process import TOKEN, Supervised
from kvlab.engines.protocol import (
    Chunk,
    Completion,
    EngineError,
    Prompt,
    checked_salt,
    whole,
)
from kvlab.engines.server import Server
from kvlab.inside import token
from kvlab.inside.token import RequireToken

_PROCESSES = "for its processes"
_OVERHEAD = 1472 << 20
"""Bytes of main memory that the CPU build's processes take besides weights and KV: 1,340 MiB of
their own pages were seen with SmolLM2-135M."""
_THREADS = 1
"""Compute threads on a CPU. One thread adds numbers in one order, so that what is printed does not
depend on the machine's cores; and several engines side by side do not fight for them."""


_EVENTS = "kv-events"
"""The socket through which vLLM tells its KV events."""


class Counters(NamedTuple):
    """vLLM's own counts since it started, and two gauges of now (in tokens and requests)."""

    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Those of them that were found."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int


def start(
    model: str | Path = "smollm2-135m",
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    block_size: int = 32,
    kv_cache_memory_bytes: int = 64 << 20,
    num_gpu_blocks_override: int | None = None,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 1024,
    max_num_seqs: int = 16,
    enable_prefix_caching: bool = True,
    enforce_eager: bool = True,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    connector: Connector | None = None,
    kv_events: bool = False,
    port: int | None = None,
    deadline: float = 600,
    extra_args: Sequence[str] = (),
) -> VLLM:
    """Start vLLM on this machine's CPU or GPU and return it when it is ready.

    `model` is a name that `kvlab.models.get` knows, or a folder with config.json, safetensors and
    a tokenizer. The other arguments are vLLM's flags of the same name; they are always passed, so
    that what an engine counts is the same on a CPU and on a GPU. The KV cache has
    kv_cache_memory_bytes / (bytes of one block) blocks, or num_gpu_blocks_override; block 0 is
    vLLM's null block and holds nothing. A connector moves KV out of the engine and in:
    `kvlab.engines.vllm_connectors` and LMCache.connector() make some. With kv_events vLLM tells
    of each block that its cache keeps or drops: see VLLM.kv_events. `deadline` is in seconds.
    `extra_args` go to the command line as they are.

    Raises EngineError, before anything is started where that can be seen: the model is cut short,
    memory is too little, the port is taken; or when vLLM ends or is not ready in time.
    kvlab.models.ModelError if no model has that name or it cannot be had,
    kvlab.environments.EnvironmentMissing if vLLM is not installed.
    """
    return VLLM(
        model,
        dtype=dtype,
        block_size=block_size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_gpu_blocks_override=num_gpu_blocks_override,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        scheduling_policy=scheduling_policy,
        connector=connector,
        kv_events=kv_events,
        port=port,
        deadline=deadline,
        extra_args=extra_args,
    ).start()


@dataclass(frozen=True)
class Connector:
    """What vLLM has to be started with to use a connector."""

    config: Callable[[], dict[str, Any]]
    """Makes the kv_transfer_config, at each start: `server` may have moved."""
    server: Server | None = None
    """What it speaks with; has to run when vLLM starts."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment."""
    files: Callable[[], dict[str, str]] = dict
    """Makes files of the run's folder, which is where vLLM is started: their text, by name."""
    ports: tuple[str, ...] = ()
    """Environment variables that name a port: each start gets free ones."""
    memory_bytes: int = 0
    """Of main memory that vLLM's process fills for it or lends."""
    chunk_size: int = 0
    """Tokens that it keeps together, if more than a block: a multiple of the block size."""


def _check(connector: object, block_size: int) -> None:
    """Raise EngineError, that says what to write, for what is no connector or does not fit."""
    if connector is None:
        return
    if not isinstance(connector, Connector):
        makes = "vllm_connectors.to_mooncake(master), for example"
        if callable(getattr(connector, "connector", None)):  # an LMCache
            makes = "connector=cache.connector(), of the LMCache that was given"
        raise EngineError(f"connector is what makes vLLM use a system: {makes}; not {connector!r}.")
    if connector.chunk_size % block_size:
        raise EngineError(
            f"A chunk of {connector.chunk_size} tokens is not made of whole blocks of "
            f"{block_size}: give a chunk_size that is a multiple of {block_size}."
        )


# What vLLM's error lines mean.
_SENTENCES = (
    (
        r"max_tokens must be at least 1, got 0",
        "Either max_tokens is 0, or the prompt alone fills max_model_len.",
    ),
    (
        r"CUDA out of memory|desired GPU memory utilization",
        "The GPU has too little free memory: stop other engines and kernels that use it.",
    ),
    (
        r"no kernel image is available|compute capability|not supported on this GPU",
        "vLLM's build does not support this GPU: set KVLAB_DEVICE=cpu to use the CPU.",
    ),
    (
        r"KV cache is needed|No available memory for the cache blocks",
        "The KV cache is too small for one request of max_model_len tokens: give a larger "
        "kv_cache_memory_bytes or a smaller max_model_len.",
    ),
    (r"Available memory on node", "Memory is too little: stop other engines and kernels."),
    (
        r"ModuleNotFoundError: No module named",
        "vLLM's environment is damaged: `.venv/bin/kvlab engines remove vllm`, then `make setup`.",
    ),
    (r"unrecognized arguments", "This vLLM does not know a flag that it was given (extra_args)."),
)


class VLLM(GeneratingServer):
    """A vLLM server; `start` makes one. Its processes end with stop() or its `with` block."""

    name = "vLLM"
    _package = "vllm"
    _environment_name = "vllm"
    _metrics_prefix = "vllm:"
    _fatal = "EngineCore encountered an issue"  # vllm/v1/engine/exceptions.py
    _sentences = _SENTENCES
    _path = "/v1/completions"
    _streamed: ClassVar = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str,
        block_size: int,
        kv_cache_memory_bytes: int,
        num_gpu_blocks_override: int | None,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        enforce_eager: bool,
        scheduling_policy: str,
        connector: Connector | None,
        kv_events: bool,
        port: int | None,
        deadline: float,
        extra_args: Sequence[str],
    ) -> None:
        super().__init__(port=port, deadline=deadline)
        sizes = {
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
        }
        if num_gpu_blocks_override is not None:
            sizes["num_gpu_blocks_override"] = num_gpu_blocks_override
        for name, size in sizes.items():
            whole(name, size)
        _check(connector, block_size)
        self._loads(model, dtype, extra_args)
        self._kv_bytes = kv_cache_memory_bytes
        if num_gpu_blocks_override is not None:
            tokens = num_gpu_blocks_override * block_size
            self._kv_bytes = room.kv_bytes(self.folder, dtype, tokens)
        self._flags = [
            *("--dtype", dtype),
            *("--block-size", str(block_size)),
            *("--kv-cache-memory-bytes", str(kv_cache_memory_bytes)),
            *("--max-model-len", str(max_model_len)),
            *("--max-num-batched-tokens", str(max_num_batched_tokens)),
            *("--max-num-seqs", str(max_num_seqs)),
            *("--scheduling-policy", scheduling_policy),
            "--enable-prefix-caching" if enable_prefix_caching else "--no-enable-prefix-caching",
            "--enforce-eager" if enforce_eager else "--no-enforce-eager",
            "--enable-chunked-prefill",
            # On by default on a GPU, off on a CPU; it shifts what a step schedules.
            "--no-async-scheduling",
            # A model's folder may bring sampling settings of its own: leave them out.
            *("--generation-config", "vllm"),
            *("--seed", "0"),
            # Of the same bytes on every machine, where the default hashes a pickle.
            *("--prefix-caching-hash-algo", "sha256_cbor"),
            # cached_tokens in the answers' usage.
            "--enable-prompt-tokens-details",
        ]
        if num_gpu_blocks_override is not None:
            self._flags += ["--num-gpu-blocks-override", str(num_gpu_blocks_override)]
        self._connector = connector
        if connector is not None:
            self._port_names = ("http", *connector.ports)
        self._event_line: zmq.Socket[bytes] | None = None
        self._tells_events = kv_events
        if kv_events:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                # Relative: a socket in the run's folder, which is where vLLM is started.
                "endpoint": f"ipc://{_EVENTS}",
            }
            self._flags += ["--kv-events-config", json.dumps(events)]
        if self.device == "cuda":
            # With the KV cache given in bytes this only says how much of the GPU must be free at
            # the start; the default of 0.92 would refuse a second engine beside the first.
            self._flags += ["--gpu-memory-utilization", "0.05"]
        self._eager = enforce_eager
        self._policy = scheduling_policy

    # What Server asks for.

    def _check_room(self) -> None:
        if self._connector is not None and self._connector.server is not None:
            self._connector.server.need()
        parts, cure = {}, "give its connector less memory"
        if self.device == "cpu":
            parts = {"weights": self._weights, "KV cache": self._kv_bytes, _PROCESSES: _OVERHEAD}
            cure = "give a smaller kv_cache_memory_bytes or a smaller model"
        if self._connector is not None and self._connector.memory_bytes:
            parts["connector"] = self._connector.memory_bytes
        room.check(self.name, parts, cure)

    def _command(self) -> list[str]:
        return [
            *(str(self._python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.folder)),
            *("--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--middleware", f"{RequireToken.__module__}.{RequireToken.__name__}"),
            *self._settings(),
        ]

    def conditions(self) -> dict[str, str]:
        found = super().conditions()
        if self._connector is not None:
            rest = [*self._connector.variables.items(), *self._connector.files().items()]
            found["connector"] = without_places("; ".join(f"{k} {v}" for k, v in rest))
        return found

    def _settings(self) -> list[str]:
        if self._connector is None:
            return super()._settings()
        connector = ["--kv-transfer-config", json.dumps(self._connector.config())]
        return [*connector, *super()._settings()]

    def _variables(self, folder: Path) -> dict[str, str]:
        env = super()._variables(folder) | {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
            "VLLM_HOST_IP": "127.0.0.1",  # for the sockets between its processes
            # Whole hashes, and not 64 bits of them.
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
            # Without a token nothing but a look: VLLM_SERVER_DEV_MODE opens more than a reset.
            token.VARIABLE: TOKEN,
        }
        if self._connector is not None:
            env |= self._connector.variables
            env |= {name: str(self.ports[name]) for name in self._connector.ports}
            for name, text in self._connector.files().items():
                (folder / name).write_text(text)
        if self.device == "cpu":
            # "nobind" leaves threads to the kernel: with the default every engine on a machine
            # binds its thread to the same core.
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(_THREADS)}
            # The model runs in the engine core's process, as on one GPU. By default the CPU build
            # starts one more, to set its threads, which are set here (vllm/platforms/cpu.py).
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            if self._eager:
                # enforce_eager leaves one small function compiled (vllm/v1/sample/ops/logprobs.py):
                # on a CPU that costs the first request 8 to 17 s and needs a C++ compiler.
                env["TORCH_COMPILE_DISABLE"] = "1"
        return env

    def _connect(self, run: Supervised) -> None:
        super()._connect(run)
        if self._tells_events:
            # Before vLLM binds it: what is told before anyone listens is lost.
            self._event_line = zmq.Context.instance().socket(zmq.SUB)
            self._event_line.set(zmq.RCVHWM, 0)  # no limit
            self._event_line.set(zmq.LINGER, 0)
            self._event_line.subscribe(b"")
            self._next_event = 0
            self._events_kept: list[dict[str, Any]] = []
            self._event_line.connect(f"ipc://{run.folder / _EVENTS}")

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._event_line is not None:
            self._event_line.close()
            self._event_line = None

    # The engine.

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
        priority: int = 0,
    ) -> dict[str, Any]:
        """A request to /v1/completions. Raises EngineError for what is no request.

        Requests with the same `cache_salt` share cached blocks, with different ones they do not. A
        smaller `priority` is served first, if vLLM was started with scheduling_policy="priority".
        Where prompt and max_tokens together exceed max_model_len, fewer tokens come, without an
        error; a prompt that alone fills it is refused.
        """
        if priority and self._policy != "priority":
            # vLLM would take it and pay no heed.
            raise EngineError(
                f"{self.name} serves first come, first served: start it with "
                f'scheduling_policy="priority" to give priorities.'
            )
        if not isinstance(prompt, str):
            prompt = [operator.index(token) for token in prompt]
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop": self._stop_strings(stop),
            "ignore_eos": ignore_eos,
            "priority": priority,
            "return_token_ids": True,
        }
        if logprobs:
            body["logprobs"] = 0  # of the sampled token alone
        if seed is not None:
            body["seed"] = seed
        if checked_salt(cache_salt) is not None:
            body["cache_salt"] = cache_salt
        return self._sendable(body)

    def completion(self, answer: dict[str, Any]) -> Completion:
        choice, usage = answer["choices"][0], answer["usage"]
        return Completion(
            text=choice["text"],
            token_ids=choice["token_ids"],
            logprobs=(choice["logprobs"] or {"token_logprobs": []})["token_logprobs"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            finish_reason=choice["finish_reason"],
        )

    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
        finish_reason = None
        for event in events:
            if event["choices"]:
                choice = event["choices"][0]
                finish_reason = choice["finish_reason"]
                logprobs = choice.get("logprobs") or {"token_logprobs": []}
                yield Chunk(choice["text"], choice["token_ids"], logprobs["token_logprobs"])
            elif finish_reason is not None:  # the last event, which has the usage alone
                usage = event["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                yield Chunk("", [], [], finish_reason, usage["prompt_tokens"], cached)

    def counters(self) -> Counters:
        """The counts that the course looks at most; the difference of two is what lay between."""
        found = self.metrics()
        return Counters(
            prefix_queries=int(found["vllm:prefix_cache_queries_total"]),
            prefix_hits=int(found["vllm:prefix_cache_hits_total"]),
            preemptions=int(found["vllm:num_preemptions_total"]),
            prompt_tokens=int(found["vllm:prompt_tokens_total"]),
            generation_tokens=int(found["vllm:generation_tokens_total"]),
            running=int(found["vllm:num_requests_running"]),
            waiting=int(found["vllm:num_requests_waiting"]),
        )

    def num_blocks(self) -> int:
        """Blocks of the KV cache as vLLM says; one of them is the null block."""
        for name, labels, _ in self._samples():
            if name == "vllm:cache_config_info":
                return int(labels["num_gpu_blocks"])
        raise EngineError(f"{self.name} reports no vllm:cache_config_info", self.log)

    def kv_events(self, wait: float = 0.5) -> list[dict[str, Any]]:
        """What the cache has done since the last call, oldest first, as vLLM tells it.

        Each is a dict with "type": "BlockStored" (block_hashes, parent_block_hash, token_ids,
        block_size, medium, extra_keys), "BlockRemoved" (block_hashes, medium) or
        "AllBlocksCleared", which comes with the step after a reset; hashes are bytes
        (vllm/distributed/kv_events.py). Events come with the step that caused them, but through
        another socket: the call ends when none has come for `wait` seconds.

        Raises EngineError if vLLM was not started with kv_events=True, or has ended; and once if
        events were lost: those that came the next call gives.
        """
        if not self._tells_events:
            raise EngineError(f"{self.name} tells no events: start it with kv_events=True.")
        if self._event_line is None:
            raise EngineError(f"{self.name} is stopped. Start it again with restart().")
        line = self._event_line
        if not 0 <= wait <= 3600:
            raise EngineError(f"wait is a number of seconds, up to an hour, and not {wait}.")
        while True:
            try:
                if not line.poll(round(wait * 1000)):
                    break
                _, number, packed = line.recv_multipart()
            except zmq.ZMQError as error:  # stop() in another thread has closed it
                raise EngineError(f"{self.name} was stopped while it was asked.") from error
            _, events, *_ = msgspec.msgpack.decode(packed)
            self._events_kept += events
            expected, self._next_event = self._next_event, int.from_bytes(number, "big") + 1
            if self._next_event != expected + 1:
                raise EngineError(
                    f"{self.name}: of its events the numbers {expected} to "
                    f"{self._next_event - 2} were lost. The next call gives those that came."
                )
        if not self._events_kept and not self.is_alive:
            raise self._ended("ended while it was asked")
        found, self._events_kept = self._events_kept, []
        return found

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks. Returns False, and forgets none, while requests hold any."""
        with self._talking() as http:
            return bool(self._checked(http.post("/reset_prefix_cache")).json()["success"])
