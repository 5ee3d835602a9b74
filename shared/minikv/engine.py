"""How does a request get from text to text?

`LLM` puts the rooms together and runs the loop: the scheduler decides a step, the runner computes
it, the scheduler accounts for it, and the new tokens become text. `generate`, `chat` and `stream`
are that loop; `add_request`, `step` and `abort` are the same from below, for a server or a
chapter that wants to watch.

What a step did is written down as plain data (`trace`), what all steps cost is counted (`stats`).
"""

from __future__ import annotations

import operator
import os
import random
import reprlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minikv.attention import KVCache, PagedBatch
from minikv.request import (
    Piece,
    Request,
    RequestOutput,
    RequestStatus,
    SamplingParams,
    whole_number,
)
from minikv.runner import Runner
from minikv.scheduler import PrefixCache, Scheduler, SchedulerOutput, make_kv
from minikv.tokenizer import Detokenizer, Tokenizer
from minikv.trace import Stats, Step, as_step
from minikv.weights import eos_token_ids, load_model, model_config, read_json

if TYPE_CHECKING:  # at run time this needs triton
    from minikv.attention.kernels import TritonBatch

Prompt = str | Sequence[int]

TRACE_STEPS = 2_000


@dataclass(eq=False)
class _Client:
    """What the engine keeps for a request beside what the scheduler sees: its text."""

    request: Request
    prompt: str | None
    detokenizer: Detokenizer | None
    told_by_step: bool = False

    def output(self) -> RequestOutput:
        request = self.request
        text = self.detokenizer.text if self.detokenizer else ""
        if self.detokenizer and not request.status.finished:
            text = text[: self.detokenizer.num_safe]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            text=text,
            token_ids=request.output_token_ids,
            logprobs=list(request.logprobs),
            cached_tokens=request.num_cached_tokens,
            finish_reason=request.status.value if request.status.finished else None,
            num_preemptions=request.num_preemptions,
        )


class LLM:
    """A model folder, ready to answer.

    folder: config.json, safetensors, and (for text) tokenizer.json; Llama or Qwen3.
    dtype: of weights and KV cache; "auto" takes the checkpoint's.
    device: "auto" takes CUDA where there is one.
    attention: "torch" gathers blocks and runs anywhere; "triton" has kernels that follow the block
        tables, for a GPU or Triton's interpreter.
    block_size: tokens of a KV block.
    num_blocks: blocks of the KV cache, the null block included; None: as many as
        kv_cache_memory_bytes holds.
    max_model_len: tokens that prompt and output of a request may have together; None: the model's
        own limit, or what the KV cache holds if that is less.
    max_num_batched_tokens, max_num_seqs, long_prefill_token_threshold, scheduling_policy: see
        `Scheduler`.
    prefix_cache: by what cached blocks are found: "hash" (`blocks.py`, as vLLM), "radix"
        (`radix.py`, as SGLang), or None: they are not.
    seed: for requests that bring none of their own; the same calls then give the same tokens.

    Raises ValueError that says what does not fit and what to change.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        attention: str = "torch",
        block_size: int = 32,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int = 64 << 20,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        prefix_cache: PrefixCache | None = "hash",
        seed: int = 0,
    ) -> None:
        block_size = whole_number("block_size", block_size, least=1)
        if num_blocks is not None:
            num_blocks = whole_number("num_blocks", num_blocks)
        if max_model_len is not None:
            max_model_len = whole_number("max_model_len", max_model_len)
        folder = Path(folder).expanduser()
        raw = read_json(folder / "config.json")
        self.config = model_config(raw)
        self.dtype = _dtype(dtype, raw)
        self.device = _device(device)
        batch = _attention(attention)
        self.kv_bytes_per_token = self.config.kv_bytes_per_token(self.dtype)
        self.stats = Stats()
        self.trace: deque[Step] = deque(maxlen=TRACE_STEPS)  # the last steps, oldest first

        if num_blocks is None:
            memory = whole_number("kv_cache_memory_bytes", kv_cache_memory_bytes)
            num_blocks = memory // (block_size * self.kv_bytes_per_token)
            if num_blocks < 2:
                raise ValueError(
                    f"kv_cache_memory_bytes={kv_cache_memory_bytes} holds {num_blocks} blocks of "
                    f"{block_size} tokens at {self.kv_bytes_per_token} bytes a token; 2 are the "
                    "least (block 0 is the null block): raise it, or lower block_size"
                )
        _check_memory(num_blocks * block_size * self.kv_bytes_per_token, self.device)
        kv = make_kv(num_blocks, block_size, prefix_cache)
        self.max_model_len = _max_model_len(
            max_model_len, self.config.max_position_embeddings, (num_blocks - 1) * block_size
        )
        self.scheduler = Scheduler(
            kv,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=whole_number("max_num_batched_tokens", max_num_batched_tokens),
            max_num_seqs=whole_number("max_num_seqs", max_num_seqs),
            long_prefill_token_threshold=whole_number(
                "long_prefill_token_threshold", long_prefill_token_threshold
            ),
            policy=scheduling_policy,
        )
        has_tokenizer = (folder / "tokenizer.json").exists()
        self.tokenizer = Tokenizer(folder) if has_tokenizer else None
        self._eos_token_ids = eos_token_ids(folder, raw)
        model = load_model(folder, self.config, self.dtype, self.device)
        cache = KVCache(self.config, num_blocks, block_size, self.dtype, self.device)
        self.runner = Runner(model, cache, batch)

        self._rng = random.Random(seed)
        self._num_requests = 0
        self._num_steps = 0
        self._clients: dict[str, _Client] = {}  # unfinished
        self._progress: dict[str, _Client] = {}  # what `step` has to tell next

    # ---- the whole way -------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all batched together; outputs in the order of the prompts.

        prompts: a text, a list of token ids, or a list of those.
        sampling_params, priority: one for all, or one for each.
        Raises ValueError before anything runs if any of them is invalid.
        """
        if not _is_list(prompts):
            many: Sequence[Any] = [prompts]
        else:
            many = [prompts] if len(prompts) > 0 and _is_token_id(prompts[0]) else prompts
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = _one_each(sampling_params, len(many), "sampling_params")
        priorities = _one_each(priority, len(many), "priority")
        clients = [
            self._make_client(prompt, p, priority=rank, cache_salt=cache_salt)
            for prompt, p, rank in zip(many, params, priorities, strict=True)
        ]
        try:
            for client in clients:
                self._add(client)
            while any(not client.request.status.finished for client in clients):
                self._step()
        finally:  # after Ctrl-C too: nothing of this call goes on running
            for client in clients:
                self.abort(client.request.request_id)
        return [client.output() for client in clients]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> RequestOutput:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], through the model's
        chat template."""
        prompt = self._need_tokenizer().apply_chat_template(messages, **template_variables)
        return self.generate(prompt, sampling_params)[0]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Iterator[Piece]:
        """Complete one prompt, giving each token when it is there.

        The request starts with the first `next`. Closing the iterator early, or dropping it,
        aborts the request and frees its blocks. Raises ValueError at once if the input is invalid.
        """
        client = self._make_client(
            prompt, sampling_params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        return self._stream(client)

    def _stream(self, client: _Client) -> Iterator[Piece]:
        self._add(client)
        num_chars = num_tokens = 0
        try:
            while True:
                so_far = client.output()  # the steps of others may have moved it on too
                if len(so_far.token_ids) == num_tokens and not so_far.finished:
                    self._step()
                    continue
                yield Piece(
                    text=so_far.text[num_chars:],
                    token_ids=so_far.token_ids[num_tokens:],
                    logprobs=so_far.logprobs[num_tokens:],
                    finish_reason=so_far.finish_reason,
                    prompt_tokens=len(so_far.prompt_token_ids),
                    cached_tokens=so_far.cached_tokens,
                )
                if so_far.finished:
                    return
                num_chars, num_tokens = len(so_far.text), len(so_far.token_ids)
        finally:
            self.abort(client.request.request_id)

    # ---- step by step --------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request and return its id; `step` runs it. Raises ValueError if it is invalid.

        priority: smaller is served first, under scheduling_policy="priority".
        cache_salt: only requests with the same salt share cached blocks.
        """
        client = self._make_client(
            prompt, sampling_params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        client.told_by_step = True
        self._add(client)
        return client.request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests of `add_request` that have got a token or have ended
        since the last call (in steps of `generate` and `stream` too), with all output so far."""
        self._step()
        told, self._progress = self._progress, {}
        return [client.output() for client in told.values()]

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks. One that has finished, or never was, is left."""
        client = self._clients.pop(request_id, None)
        if client is not None:
            self.scheduler.finish(client.request, RequestStatus.FINISHED_ABORTED)
            self._note_progress(client)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing happens, while a request holds some."""
        return self.scheduler.kv.reset()

    def forward(self, token_ids: Sequence[int]) -> Tensor:
        """Logits after each token of one sequence, float32 [n, vocab_size], without any cache: all
        n tokens are computed. It shows what generation costs when nothing is remembered.

        Raises ValueError for tokens that are none, or more than the model was made for."""
        token_ids = self._check_token_ids(token_ids)
        if len(token_ids) > self.config.max_position_embeddings:
            raise ValueError(
                f"{len(token_ids)} tokens, but the model was made for "
                f"{self.config.max_position_embeddings}"
            )
        self.stats.token_forwards += len(token_ids)
        return self.runner.forward(token_ids)

    # ---- inside --------------------------------------------------------------------------------

    def _step(self) -> None:
        """Schedule, run, account, and turn tokens into text."""
        out = self.scheduler.schedule()
        try:
            tokens, logprobs = self.runner.execute(out.scheduled) if out.scheduled else ({}, {})
            self._record(out)
            self.scheduler.update(out, tokens, logprobs)
            self._give_text(tokens)
        except BaseException:  # out of memory, Ctrl-C: what the step wrote is unknown
            for share in out.scheduled:
                request = share.request
                if request.request_id in self._clients:
                    self.abort(request.request_id)
                    # `update` may have finished it, but its last token never became text.
                    request.status = RequestStatus.FINISHED_ABORTED
            raise

    def _give_text(self, tokens: Mapping[str, int]) -> None:
        for request_id, token in tokens.items():
            client = self._clients[request_id]
            request = client.request
            # A token that ended the output gives no text (end-of-sequence, stop_token_ids).
            gives_text = request.status is not RequestStatus.FINISHED_STOPPED
            if client.detokenizer and gives_text and client.detokenizer.append(token):
                # vLLM as well finds stop strings outside the scheduler. The text decides, also if
                # the same token was the last that max_tokens allows.
                self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)
                request.status = RequestStatus.FINISHED_STOPPED
            self._note_progress(client)
            if request.status.finished:
                del self._clients[request_id]

    def _note_progress(self, client: _Client) -> None:
        """`generate` and `stream` see to their own requests; `step` tells of all others."""
        if client.told_by_step:
            self._progress[client.request.request_id] = client

    def _record(self, out: SchedulerOutput) -> None:
        """Write the step into `trace` and `stats`; before `update`, which changes the requests."""
        step = as_step(self._num_steps, out, self.scheduler)
        self.trace.append(step)
        self.stats.count(step, out, self.scheduler)
        self.stats.copied_bytes += self.runner.copied_bytes if out.scheduled else 0
        self._num_steps += 1

    def _make_client(
        self, prompt: Prompt, params: SamplingParams, *, priority: int, cache_salt: str | None
    ) -> _Client:
        """Check a request and number it; it is not queued yet."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams; got {params!r}")
        priority = whole_number("priority", priority)
        if priority and self.scheduler.policy != "priority":
            raise ValueError('priorities need LLM(..., scheduling_policy="priority")')
        if not isinstance(cache_salt, str | None):
            raise ValueError(f"cache_salt must be a text or None; got {cache_salt!r}")
        try:
            (cache_salt or "").encode()
        except UnicodeEncodeError as error:  # else hashing would raise once a block is full
            raise ValueError(f"cache_salt has no UTF-8 form: {cache_salt!r} ({error})") from None
        text = prompt if isinstance(prompt, str) else None
        token_ids = self._check_token_ids(
            self._need_tokenizer().encode(text) if text is not None else prompt
        )
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output in "
                f"max_model_len={self.max_model_len}: shorten it, or raise max_model_len (and "
                "num_blocks or kv_cache_memory_bytes with it)"
            )
        if params.stop:
            self._need_tokenizer()
        self._num_requests += 1
        # Each request draws from a generator of its own: what it is batched with, and how it is cut
        # into chunks, cannot change its tokens.
        own_seed = self._rng.getrandbits(64) if params.seed is None else params.seed
        request = Request(
            request_id=str(self._num_requests - 1),
            token_ids=token_ids,
            params=params,
            rng=random.Random(own_seed),
            eos_token_ids=self._eos_token_ids,
            priority=priority,
            arrival=self._num_requests,
            cache_salt=cache_salt,
        )
        detokenizer = None
        if self.tokenizer:
            detokenizer = Detokenizer(self.tokenizer, params.stop, token_ids)
        return _Client(request, text, detokenizer)

    def _add(self, client: _Client) -> None:
        self.scheduler.add(client.request)
        self._clients[client.request.request_id] = client

    def _check_token_ids(self, token_ids: Any) -> list[int]:
        if not _is_list(token_ids) or not all(_is_token_id(token) for token in token_ids):
            raise ValueError(
                "a prompt must be a text or a list of whole numbers (token ids); got "
                f"{reprlib.repr(token_ids)}"
            )
        if len(token_ids) == 0:
            raise ValueError("the prompt is empty: the model needs at least one token")
        size = self.config.vocab_size
        ids = [operator.index(token) for token in token_ids]
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the vocabulary (0 to {size - 1})")
        return ids

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the model folder has no tokenizer.json: give prompts as token ids, without stop "
                "strings"
            )
        return self.tokenizer


def _is_list(value: Any) -> bool:
    """Whether it is items in an order: a list, a tuple, a tensor or array, but no text or dict."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, str | bytes | Mapping)
    )


def _is_token_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{count} prompts but {len(value)} {name}: give one, or one for each")
    return list(value)


def _dtype(name: str, raw: Mapping[str, Any]) -> torch.dtype:
    if name == "auto":  # "torch_dtype" before transformers 5
        name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype must be auto, {', '.join(dtypes)}; got {name!r}")
    return dtypes[name]


def _attention(name: str) -> type[PagedBatch] | type[TritonBatch]:
    if name == "torch":
        return PagedBatch
    if name != "triton":
        raise ValueError(f"attention must be torch or triton; got {name!r}")
    try:
        from minikv.attention.kernels import TritonBatch
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            "attention='triton' needs the package triton, which is not installed: install it, or "
            "take attention='torch'"
        ) from None
    return TritonBatch


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but this torch sees no GPU: use 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _check_memory(kv_bytes: int, device: torch.device) -> None:
    """Refuse a KV cache that the whole machine or GPU could not hold: else the system might
    promise the memory and end the process when it is written."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if kv_bytes > memory:
        raise ValueError(
            f"the KV cache would take {kv_bytes / 1e9:.1f} GB, and there are {memory / 1e9:.1f} GB "
            "in all: lower num_blocks or kv_cache_memory_bytes"
        )


def _max_model_len(asked: int | None, model_limit: int, pool_tokens: int) -> int:
    """A request that is alone must always fit, else it would be preempted for ever. vLLM checks
    the same at start (v1/core/kv_cache_utils.py, `check_enough_kv_cache_memory`)."""
    if asked is None:
        return min(model_limit, pool_tokens)
    if asked < 2:
        raise ValueError(f"max_model_len must be at least 2, a token in and one out; got {asked}")
    if asked > model_limit:
        raise ValueError(f"max_model_len={asked}, but the model was made for {model_limit} tokens")
    if asked > pool_tokens:
        raise ValueError(
            f"max_model_len={asked}, but the KV cache holds {pool_tokens} tokens: lower it, or "
            "raise num_blocks or kv_cache_memory_bytes"
        )
    return asked
