"""A server of known delays: what it will do is in the prompt, and when it did it, it says.

    python known_delays.py PORT

It answers POST /v1/completions as vLLM streams it. A prompt is five numbers:
[kind, first_ms, gap_ms, tokens, tokens_in_a_chunk]; any other gets max_tokens tokens, four a chunk,
the first chunk after 100 ms and each further one 100 ms later. kind 0: as said; 1: one after
another, the others wait (queued); 2: it stalls after half of the tokens and never goes on; 3: it
breaks the connection off after half of them; 4: it refuses with 503; 5: so too, at endless length;
6: it streams without an end.

Each event carries the moment at which it was sent, on the clock that all processes of a machine
share (CLOCK_MONOTONIC); and "error": null, as servers may that have a place for one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from aiohttp import web

turn = asyncio.Lock()
USAGE_SECONDS = 0.2


def event(**content: object) -> bytes:
    return b"data: " + json.dumps(content | {"error": None}).encode() + b"\n\n"


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    own = len(body["prompt"]) == 5
    asked = body["prompt"] if own else (0, 100, 100, body["max_tokens"], 4)
    kind, first, gap, tokens, width = asked
    if kind == 4:
        return web.json_response({"error": {"message": "full"}}, status=503)
    if kind == 5:
        response = web.StreamResponse(status=503)
        await response.prepare(request)
        while True:
            await response.write(b"full " * 200)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while kind == 6:
        await response.write(b": nothing\n" * 200)
    if kind == 1:
        async with turn:
            await answer(request, response, kind, first, gap, tokens, width)
    else:
        await answer(request, response, kind, first, gap, tokens, width)
    return response


async def answer(
    request: web.Request,
    response: web.StreamResponse,
    kind: int,
    first: int,
    gap: int,
    tokens: int,
    width: int,
) -> None:
    due = time.monotonic() + first / 1000
    sent = 0
    while sent < tokens:
        await asyncio.sleep(max(0, due - time.monotonic()))
        due += gap / 1000
        now = min(width, tokens - sent)
        sent += now
        choice = {
            "text": "x" * now,
            "token_ids": [7] * now,
            "logprobs": {"token_logprobs": [-0.5] * now},
            "finish_reason": "length" if sent == tokens else None,
        }
        await response.write(event(choices=[choice], sent_at=time.monotonic()))
        if kind in (2, 3) and sent >= tokens // 2:
            if kind == 2:
                await asyncio.sleep(3600)
            assert request.transport is not None
            request.transport.close()
            return
    await asyncio.sleep(USAGE_SECONDS)  # as vLLM's, it has an event of its own
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": tokens,
        "total_tokens": 10 + tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    await response.write(event(choices=[], usage=usage))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()


async def health(_: web.Request) -> web.Response:
    return web.Response()


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
