"""An open-loop client: requests leave when they are due, whatever the server does.

    from kvlab import load

    run = load.send(engine, workload, timeout=60)

A *closed* loop (so many users, each of whom waits for its answer) slows down with the server: the
worse the server, the less it is asked, and the better its latencies look. Here a request that is
due is sent, also while a hundred others wait. How late the client itself was is part of what is
measured. An answer that never comes, breaks off or is refused is an outcome too, and no exception.

The requests run in a thread of their own, so that a notebook can show progress and be interrupted:
after Ctrl-C what was measured is there, and what was not yet due is counted as not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import aiohttp

from kvlab.engines.generating import Wire
from kvlab.engines.protocol import Chunk, EngineError
from kvlab.progress import Line
from kvlab.workloads import Workload

_LEAD = 0.2
"""Seconds between the start of the thread and the moment 0 of the workload."""
_LONGEST_ANSWER = 64 << 20
"""Bytes: what streams more than this for one request will not end by itself."""
_LONGEST_REFUSAL = 300
"""Bytes of a refusal that are read."""


class Target(Protocol):
    """What can be sent to: every `kvlab.engines.generating.GeneratingServer`."""

    def wire(self, prompt: list[int], **options: Any) -> Wire: ...
    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[Chunk]: ...


@dataclass
class Outcome:
    """What became of one request. Times are seconds on one clock, of which 0 is the start."""

    index: int
    """its place in the workload"""
    group: str
    due: float
    """when the workload wanted it sent"""
    sent: float
    """when the client sent it"""
    ended: float = 0.0
    """when its last byte came, or when it failed"""
    times: list[float] = field(default_factory=list)
    """when each chunk came that held tokens"""
    tokens: list[int] = field(default_factory=list)
    """how many tokens each of them held"""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    failure: str = ""
    """Why there is no whole answer: "timeout", "refused: ...", "broke off: ...", "short: ...",
    "not understood: ...", "stopped", "not sent, ..."."""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass
class Run:
    """The outcomes of a workload, in its order."""

    outcomes: list[Outcome]
    planned: int
    """requests in the workload; after Ctrl-C fewer were sent"""
    manifest: dict[str, Any]
    zero: float
    """moment 0 on time.perf_counter(), to put an engine's own times beside"""

    @property
    def not_sent(self) -> int:
        return self.planned - len(self.outcomes)


def send(
    target: Target,
    workload: Workload,
    *,
    timeout: float = 120,
    block_size: int = 32,
    **options: Any,
) -> Run:
    """Send a workload and gather what came back.

    timeout: seconds after which a request counts as failed, from when it was sent. block_size: of
    the unlimited cache in the manifest; the engine's own, to compare it with. options: as for the
    engine's generate(); each request asks for its own max_tokens and goes on to that length.
    Raises EngineError if a request cannot be written at all, ValueError for a timeout that is none
    or moments that are not in order; nothing was sent then.
    """
    if not timeout > 0:
        raise ValueError(f"timeout is a time in seconds, more than 0, and not {timeout!r}.")
    moments = [request.at for request in workload.requests]
    if not all(before <= after for before, after in pairwise([0.0, *moments])):
        raise ValueError("Requests have to be in the order of their moments, from 0 on.")
    _raise_file_limit(len(moments))
    # Log-probabilities nobody asks for in production, and they cost time in every step.
    asked: dict[str, Any] = {"ignore_eos": True, "logprobs": False}
    wires = [
        target.wire(r.prompt, **asked | {"max_tokens": r.output} | options)
        for r in workload.requests
    ]
    sending = _Sending(wires, workload, timeout)
    thread = threading.Thread(target=sending.run, name="load", daemon=True)
    with Line(f"{len(wires)} requests") as line:
        try:
            thread.start()
            while thread.is_alive():
                thread.join(0.2)
                line.tick(lambda _: f"{len(sending.raw)} sent, {sending.done} done")
        except KeyboardInterrupt:
            sending.stop()
            if thread.ident is not None:
                thread.join()
            print(f"Stopped: {len(sending.raw)} of {len(wires)} requests were sent.")
    if sending.error is not None:
        raise sending.error
    outcomes = [_read(target, raw) for raw in sorted(sending.raw, key=lambda raw: raw[0].index)]
    for outcome in outcomes:
        wanted = options.get("max_tokens", workload.requests[outcome.index].output)
        if outcome.ok and options.get("ignore_eos", True) and sum(outcome.tokens) < wanted:
            # Less work than was asked for is no better latency. (vLLM cuts at max_model_len.)
            outcome.failure = f"short: {sum(outcome.tokens)} of {wanted} tokens"
    return Run(outcomes, len(wires), workload.manifest(block_size), sending.zero)


def _raise_file_limit(connections: int) -> None:
    """Let this process have a socket for each request at once, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 200
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


Raw = tuple[Outcome, list[tuple[float, bytes]]]
"""An outcome and the events of its stream as they came, not yet read: reading takes time."""


class _Sending:
    """The client's thread."""

    def __init__(self, wires: Sequence[Wire], workload: Workload, timeout: float) -> None:
        self._wires = wires
        self._requests = workload.requests
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self.raw: list[Raw] = []
        self.done = 0
        self.zero = 0.0
        self._stopped = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._all())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stopped = True  # also before there is a loop
        if self._loop is not None and self._main is not None:
            with contextlib.suppress(RuntimeError):  # it has just done all
                self._loop.call_soon_threadsafe(self._main.cancel)

    async def _all(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        connector = aiohttp.TCPConnector(limit=0)  # a limit would be a queue in the client
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
            asyncio.TaskGroup() as tasks,
        ):
            self.zero = time.perf_counter() + _LEAD
            # The workload is in the order of arrival; what is due at the same time keeps it.
            for index, request in enumerate(self._requests):
                if self._stopped:
                    break
                wait = self.zero + request.at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._one(http, index))

    async def _one(self, http: aiohttp.ClientSession, index: int) -> None:
        zero = self.zero
        request, wire = self._requests[index], self._wires[index]
        outcome = Outcome(index, request.group, request.at, time.perf_counter() - zero)
        events: list[tuple[float, bytes]] = []
        self.raw.append((outcome, events))
        try:
            async with http.post(wire.url, data=wire.body, headers=wire.headers) as answer:
                if answer.status >= 400:
                    said = await _beginning(answer.content, _LONGEST_REFUSAL)
                    outcome.failure = f"refused: {answer.status} {said.decode(errors='replace')}"
                    return
                received = 0
                async for line in answer.content:
                    received += len(line)
                    if received > _LONGEST_ANSWER:
                        outcome.failure = f"not understood: more than {_LONGEST_ANSWER:,} bytes"
                        return
                    if line.startswith(b"data: "):
                        events.append((time.perf_counter() - zero, line[6:]))
        except TimeoutError:
            outcome.failure = "timeout"
        except asyncio.CancelledError:
            outcome.failure = "stopped"
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                outcome.failure = "not sent, this client had too many open files (`ulimit -n`)"
            else:
                outcome.failure = f"broke off: {type(error).__name__} {error}"
        except Exception as error:  # whatever a server sends: one odd answer harms no other
            outcome.failure = f"broke off: {type(error).__name__} {str(error)[:200]}"
        finally:
            outcome.ended = time.perf_counter() - zero
            self.done += 1


async def _beginning(content: aiohttp.StreamReader, most: int) -> bytes:
    """The first bytes of a body, which may have no end."""
    said = b""
    while len(said) < most and (more := await content.read(most - len(said))):
        said += more
    return said


def _is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on. (True is an int to Python, and no count.)"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _believable(chunk: Chunk) -> Chunk:
    """The chunk, if its numbers can be what they stand for. Raises ValueError."""
    if not all(map(_is_count, chunk.token_ids)):
        raise ValueError(f"token ids {chunk.token_ids!r:.80}")
    prompt, cached = chunk.prompt_tokens, chunk.cached_tokens
    for name, count in (("prompt", prompt), ("cached", cached)):
        if count is not None and not _is_count(count):
            raise ValueError(f"{count!r:.40} {name} tokens")
    if prompt is not None and cached is not None and cached > prompt:
        raise ValueError(f"{cached} cached tokens of {prompt} prompt tokens")
    return chunk


def _read(target: Target, raw: Raw) -> Outcome:
    """The outcome with what its events say."""
    outcome, events = raw
    now = 0.0
    error = ""

    def parsed() -> Iterator[dict[str, Any]]:
        nonlocal now, error
        for moment, data in events:
            now = moment
            if data.strip() == b"[DONE]":
                continue
            event = json.loads(data)
            if event.get("error") is not None:
                error = f"refused: {str(event['error'])[:300]}"
                return
            yield event

    finished = None
    try:
        for chunk in map(_believable, target.chunks(parsed())):
            if chunk.token_ids:
                outcome.times.append(now)
                outcome.tokens.append(len(chunk.token_ids))
                outcome.token_ids += chunk.token_ids
            if chunk.finish_reason is not None:
                finished = chunk.finish_reason
                outcome.prompt_tokens = chunk.prompt_tokens
                outcome.cached_tokens = chunk.cached_tokens
    except EngineError as refused:
        error = f"refused: {refused}"
    except Exception as wrong:  # an answer in another form, or a hostile one
        error = f"not understood: {type(wrong).__name__} {str(wrong)[:200]}"
    if not outcome.failure:
        if error:
            outcome.failure = error
        elif finished is None:
            outcome.failure = "broke off: the stream ended before the answer did"
    return outcome
