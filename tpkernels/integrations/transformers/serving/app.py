"""The HTTP routes, and what holds for every request: its key, the size of its body, its place in
the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tpkernels.integrations.transformers.serving import api
from tpkernels.integrations.transformers.serving.api import ApiError, Prompt, Replies, TextPiece
from tpkernels.integrations.transformers.serving.batcher import Answers, Batcher

_HUNG_UP = 499  # nginx's status for a client that has gone
_HEADER_S = 30.0  # for a client to send the header of a request
_BODY_S = 30.0  # for a client to send its body
_RETRY_S = 1  # after which a refused client may try again
_SLOW_READER_S = 30.0  # in addition to the time for the answer, for a client to read it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """What is served."""

    name: str  #: of the model
    batcher: Batcher
    prompts: api.Prompts
    key: str | None = None  #: that clients must send as ``Authorization: Bearer KEY``
    most_bytes: int = 1 << 20  #: of a request's body


def make_app(service: Service, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="tpkernels", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(_Guard, service=service)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error)
    begun = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        why = service.batcher.failure()
        return JSONResponse({"status": why or "ok"}, 200 if why is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.batcher.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    model = {"id": service.name, "object": "model", "created": begun, "owned_by": "tpkernels"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_name(name, service)
        return model

    @app.post("/v1/completions")
    async def complete(body: api.CompletionRequest, request: Request) -> Response:
        _check_name(body.model, service)
        prompts = [await service.prompts.of_completion(one, body.echo) for one in body.prompt]
        return await _answer(service, request, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat(body: api.ChatRequest, request: Request) -> Response:
        _check_name(body.model, service)
        prompt = await service.prompts.of_chat(body.messages)
        return await _answer(service, request, body, [prompt])

    return app


def _check_name(name: str, service: Service) -> None:
    if name != service.name:
        raise ApiError(
            404,
            f"model {name[:100]!r} does not exist; this server serves {service.name!r}",
            param="model",
            code="model_not_found",
        )


async def _answer(
    service: Service, request: Request, body: api.Request, prompts: list[Prompt]
) -> Response:
    answers = service.batcher.submit(body.wanted(prompts, service.prompts.most))
    pieces = answers.pieces()
    replies = Replies(body, service.prompts, prompts)
    try:  # Errors until a stream begins have a status of their own.
        received = await _unless_gone(request, _take(pieces, 1 if body.stream else None))
    except BaseException:
        answers.close()
        raise
    if received and body.stream:
        events = _events(
            request, replies, len(answers.all), received[0], pieces, body.include_usage
        )
        return _Stream(answers, events, service.batcher.timeout + _SLOW_READER_S)
    answers.close()
    if not received:
        return Response(status_code=_HUNG_UP)
    return JSONResponse(replies.whole(received))


async def _take(pieces: AsyncIterator[TextPiece], count: int | None) -> list[TextPiece]:
    """Return so many pieces, or all."""
    received: list[TextPiece] = []
    while len(received) != count and (piece := await anext(pieces, None)) is not None:
        received.append(piece)
    return received


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T | None:
    """Return the result of ``work``; if the client hangs up, cancel it and return None."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _events(
    request: Request,
    replies: Replies,
    answers: int,
    first: TextPiece,
    more: AsyncIterator[TextPiece],
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a stream. ``request.state.status`` tells the metrics how it ended."""
    request.state.status = _HUNG_UP
    try:
        for event in (*replies.start(answers), *replies.piece(first)):
            yield event
        async for piece in more:
            for event in replies.piece(piece):
                yield event
        if include_usage:
            yield replies.usage()
        request.state.status = 200
    except ApiError as error:
        request.state.status = error.status
        yield api.event(error.body())
    yield api.DONE


class _Stream(StreamingResponse):
    """Closes the answers however the response ends, even if its first event is never asked for."""

    def __init__(self, answers: Answers, events: AsyncIterator[str], timeout: float) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._answers, self._timeout = answers, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(super().__call__(scope, receive, send), self._timeout)
        finally:
            self._answers.close()


class _Guard:
    """A middleware of ASGI around the app."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        # Routes may overwrite it: a stream may fail after its status has been sent.
        outcome = scope.setdefault("state", {})
        outcome["status"] = _HUNG_UP

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome["status"] = message["status"]
            await send(message)

        try:
            try:
                unread = [await self._read(Request(scope, receive))]
            except ApiError as error:
                await JSONResponse(error.body(), error.status)(scope, receive, noting)
                return
            except ClientDisconnect:
                return

            async def replay() -> Message:
                if not unread:
                    return await receive()
                return {"type": "http.request", "body": unread.pop(), "more_body": False}

            await self._app(scope, replay, noting)
        finally:
            self._service.batcher.metrics.requests.labels(str(outcome["status"])).inc()

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raise ApiError if the key is wrong, or the body late or too large."""
        sent, key = request.headers.get("authorization", ""), self._service.key
        if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        body, most = bytearray(), self._service.most_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise ApiError(413, f"the body is larger than {most} bytes")
        except TimeoutError as error:
            raise ApiError(408, f"the body took longer than {_BODY_S:g} s") from error
        return bytes(body)


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, with a limit of the time for a request's header, and errors in JSON."""

    _waiting: asyncio.TimerHandle | None = None  # for a header

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._waiting is not None:
            self._waiting.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        late = f"the header took longer than {_HEADER_S:g} s"
        self._waiting = self.loop.call_later(_HEADER_S, self._refuse, 408, late)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with a reply if none is under way. A late header is none then."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(ApiError(status, message).body()).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json"
                f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        elif status == 408:
            return
        self.transport.close()


def _refusal(request: Request, error: RequestValidationError) -> ApiError:
    """Return the error of a body that is not what a route takes."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        return ApiError(400, f"content-type is {kind[:100]!r}; send application/json")
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        what, at = first["ctx"]["error"], first["loc"][-1]
        return ApiError(400, f"the body is not JSON: {what}, at character {at}")
    # Of the place only fields and indices count; pydantic also names what it tried on them.
    places = itertools.takewhile(
        lambda part: str(part).isidentifier() or type(part) is int, first["loc"][1:]
    )
    where = ".".join(map(str, places))
    what = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        what = "unknown field; leave it out"
    return ApiError(400, f"{where}: {what}".lstrip(": "), param=where or None)


async def _error(request: Request, error: Exception) -> Response:
    """Reply to any error as OpenAI does."""
    if isinstance(error, RequestValidationError):
        error = _refusal(request, error)
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"internal error: {type(error).__name__}; see the log of the server")
    headers = {"retry-after": str(_RETRY_S)} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)
