"""A server that changes something only for those who know its token.

An engine listens on loopback, where every program and every web page of this machine can
reach it; and the routes that a course needs (forget the prefix cache) come together with
some that run what they are told. So whatever is not a mere look needs the token that the
notebook gave the engine in its environment.

vLLM 0.32.0 has keys of its own (--api-key), but guards only paths such as /v1 with them
(vllm/entrypoints/serve/middleware/authenticate.py). It loads this class by --middleware.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "KVLAB_ENGINE_TOKEN"


class RequireToken:
    """ASGI middleware: 401 for all but GET and HEAD, unless the bearer token is right."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]
    ) -> None:
        looks = scope["type"] == "lifespan" or scope.get("method") in ("GET", "HEAD")
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if looks or secrets.compare_digest(given, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            body = b'{"error": {"message": "this needs the engine\'s token"}}'
            await send({"type": "http.response.body", "body": body})
