"""An engine behind HTTP: a request goes as JSON, the answer comes whole or as a stream of events.

What differs between engines is the form of request and answer. A derived class says it in `_path`,
`body`, `completion` and `chunks`, and has `reset_prefix_cache`, `model`, `device`, `_flags` and
what `System` asks for; how one or several prompts are asked, and what a broken stream means, stands
here once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, overload

import httpx

from kvlab import environments, models
from kvlab.engines import room
from kvlab.engines.protocol import (
    Chunk,
    Completion,
    EngineError,
    Prompt,
    Prompts,
    complete,
    only,
)
from kvlab.engines.server import Server


@dataclass(frozen=True)
class Wire:
    """A request as it goes over the line, by POST."""

    url: str
    headers: dict[str, str]
    body: bytes


_PATIENCE = httpx.Timeout(600, connect=5)
"""For answers in one piece: they come after their last token."""

_PLACE = re.compile(r"(?:tcp://)?127\.0\.0\.1(?::\d+)?|(?<=port\": )\d+|(?<=\")/[^\"]*")


def without_places(text: str) -> str:
    """Settings without ports, addresses and paths, which change from start to start and decide
    nothing."""
    return _PLACE.sub("...", text)


class GeneratingServer(Server):
    """A server that completes prompts."""

    _package: str
    """The distribution whose version counts; each engine names its own."""
    _path = ""
    """Where requests go, by POST."""

    # What a derived class gives.

    def body(self, prompt: Prompt, *_: Any, **options: Any) -> dict[str, Any]:
        """The request for one prompt. Raises EngineError for what is no request, TypeError for an
        option that the engine does not have."""
        raise NotImplementedError

    def completion(self, answer: dict[str, Any]) -> Completion:
        """A whole answer in the course's terms."""
        raise NotImplementedError

    def chunks(self, events: Iterable[dict[str, Any]]) -> Iterator[Chunk]:
        """The events of a stream in the course's terms."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget cached KV. Returns False where a request that holds some prevents it."""
        raise NotImplementedError

    _streamed: ClassVar[dict[str, Any]] = {"stream": True}
    """What turns a request into one for a stream."""

    model: str
    """The model's name, as metrics and requests have it."""
    device: str
    """"cpu" or "cuda"."""
    _flags: Sequence[str] = ()
    _extra_args: Sequence[str] = ()

    def _loads(self, model: str | Path, dtype: str, extra_args: Sequence[str]) -> None:
        """Take what an engine of its own has: a model and further flags. Raises EngineError."""
        if dtype not in room.WIDTH:
            raise EngineError(f"dtype is one of {', '.join(room.WIDTH)}, and not {dtype!r}.")
        if isinstance(extra_args, str):
            raise EngineError("extra_args is a list of words, not one text: use text.split().")
        environments.python(self._environment_name)  # before a model is made for nothing
        self.device = environments.device()
        self.folder = models.folder(model)
        """The model's folder."""
        self.model = self.folder.name if isinstance(model, Path) or Path(model).is_dir() else model
        self._of = f"with {self.model}"
        self._weights = room.weights(self.folder) * room.WIDTH[dtype]
        """Bytes."""
        self._extra_args = list(extra_args)

    def _settings(self) -> list[str]:
        """All flags, but for its own ports. Asked anew at each start: other servers may have
        moved."""
        return [*self._flags, *self._extra_args]

    def conditions(self) -> dict[str, str]:
        """What a figure that was measured on it depends on, for a result file: all that it was
        started with, but where other servers and folders are."""
        return {
            "system": self.name,
            "version": environments.version(self._package, self._environment_name, self.device),
            "model": self.model,
            "device": self.device,
            "flags": without_places(" ".join(self._settings())),
        }

    # What follows from it.

    @property
    def pins(self) -> str:
        """Names the environment that runs it: another one for other versions of anything in it."""
        return environments.folder(self._environment_name).name

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, **options: Any) -> list[Completion]: ...
    def generate(self, prompt: Prompt | Prompts, **options: Any) -> Completion | list[Completion]:
        """Complete one prompt, or several at the same time.

        A prompt is text or a list of token ids; a list of prompts gives a list of completions in
        the same order. Several are sent as requests of their own, all at once: in which order the
        scheduler sees them is not fixed. Raises EngineError.

        max_tokens (16): new tokens at most. temperature (0): 0 is greedy. top_p (1). seed (None).
        stop (()): strings; the text ends before the first that appears. ignore_eos (False): go on
        after the end token. cache_salt (None): requests with the same one share cached KV, with
        different ones they do not. logprobs (True): give log-probabilities, which take time to
        compute. An engine may have more: see its `body`.
        """
        return complete(prompt, lambda one: self.completion(self.ask(self.body(one, **options))))

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Chunk]:
        """Complete one prompt and yield what comes as it comes; options as in generate().

        The request is sent with the first next(). Closing the generator early (leaving a `for`
        loop over it does, close() does) closes the connection, and the engine aborts the request.
        """
        yield from self.stream_of(self.body(only(prompt), **options))

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request, as JSON. Raises EngineError."""
        with self._talking() as http:
            found = http.post(self._path, json=body, timeout=_PATIENCE)
            answer: dict[str, Any] = self._checked(found).json()
        return answer

    def stream_of(self, body: dict[str, Any]) -> Generator[Chunk]:
        """The answer to a request, as it comes. Raises EngineError."""
        with (
            self._talking() as http,
            http.stream(
                "POST", self._path, json=body | self._streamed, timeout=_PATIENCE
            ) as answer,
        ):
            yield from self.chunks(self._events(self._checked(answer).iter_lines()))

    def wire(self, prompt: Prompt, **options: Any) -> Wire:
        """The request for a stream, for a client that sends many: `kvlab.load`. What comes back,
        chunks() understands."""
        body = self.body(prompt, **options) | self._streamed
        token = self._http.headers["Authorization"]
        headers = {"Authorization": token, "Content-Type": "application/json"}
        return Wire(self.url + self._path, headers, json.dumps(body).encode())

    def _events(self, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html"""
        for line in lines:
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if event.get("error") is not None:
                raise self._refused(data)
            yield event

    def _stop_strings(self, stop: str | Sequence[str]) -> list[str]:
        """The strings before which a text ends, as a list. Raises EngineError."""
        listed = [stop] if isinstance(stop, str) else stop
        if not isinstance(listed, (list, tuple)) or not all(isinstance(s, str) for s in listed):
            raise EngineError(f"stop is a string or a list of them, and not {stop!r:.80}.")
        return list(listed)

    def _sendable(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body, if it can be written as JSON; else raises EngineError that says why not."""
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise EngineError(f"{self.name} cannot be asked that: {error}.") from None
        return body
