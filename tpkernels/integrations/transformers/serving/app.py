"""HTTP routes, and the middleware around them: API key, limit of the body size, metrics."""

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
from tpkernels.integrations.transformers.serving.api import AnswerDelta, ApiError, Prompt, Replies
from tpkernels.integrations.transformers.serving.batcher import Answers, Batcher

_CLIENT_CLOSED_REQUEST = 499  # nginx status: the client closed the connection
_HEADER_S = 30.0  # deadline for the header of a request
_BODY_S = 30.0  # deadline for the body of a request
_RETRY_S = 1  # Retry-After header of rejected requests
_SLOW_READER_S = 30.0  # time to read the answer, added to the time for generating it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """The served model."""

    name: str  #: model name in requests
    batcher: Batcher
    prompts: api.Prompts
    key: str | None = None  #: clients must send ``Authorization: Bearer KEY``
    max_body_bytes: int = 1 << 20  #: max size of a request body


def make_app(service: Service, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """Return the FastAPI application."""
    app = FastAPI(title="tpkernels", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(_Guard, service=service)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error)
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        reason = service.batcher.failure()
        return JSONResponse({"status": reason or "ok"}, 200 if reason is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.batcher.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    model = {"id": service.name, "object": "model", "created": started, "owned_by": "tpkernels"}

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
        prompts = [await service.prompts.encode_completion(item, body.echo) for item in body.prompt]
        return await _answer(service, request, body, prompts)

    @app.post("/v1/chat/completions")
    async def chat(body: api.ChatRequest, request: Request) -> Response:
        _check_name(body.model, service)
        prompt = await service.prompts.encode_chat(body.messages)
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
    answers = service.batcher.submit(body.answer_specs(prompts, service.prompts.max_length))
    deltas = answers.deltas()
    replies = Replies(body, service.prompts, prompts)
    try:  # Errors before the first event of a stream are replies with a status.
        received = await _cancel_on_disconnect(
            request, _collect(deltas, 1 if body.stream else None)
        )
    except BaseException:
        answers.close()
        raise
    if received and body.stream:
        events = _events(
            request, replies, len(answers.all), received[0], deltas, body.include_usage
        )
        return _Stream(answers, events, service.batcher.timeout + _SLOW_READER_S)
    answers.close()
    if not received:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return JSONResponse(replies.full_reply(received))


async def _collect(deltas: AsyncIterator[AnswerDelta], count: int | None) -> list[AnswerDelta]:
    """Return the next ``count`` deltas, or all if it is None."""
    received: list[AnswerDelta] = []
    while len(received) != count and (delta := await anext(deltas, None)) is not None:
        received.append(delta)
    return received


async def _cancel_on_disconnect(request: Request, work: Awaitable[_T]) -> _T | None:
    """Return the result of ``work``. If the client disconnects, cancel it and return None."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, disconnected = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(wait_for_disconnect()),
    )
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        disconnected.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _events(
    request: Request,
    replies: Replies,
    answers: int,
    first: AnswerDelta,
    remaining: AsyncIterator[AnswerDelta],
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a stream. ``request.state.status`` is its final status, for the
    metrics."""
    request.state.status = _CLIENT_CLOSED_REQUEST
    try:
        for event in (*replies.start_events(answers), *replies.delta_events(first)):
            yield event
        async for delta in remaining:
            for event in replies.delta_events(delta):
                yield event
        if include_usage:
            yield replies.usage_event()
        request.state.status = 200
    except ApiError as error:
        request.state.status = error.status
        yield api.event(error.body())
    yield api.DONE


class _Stream(StreamingResponse):
    """A streaming response that closes the answers however it ends, even if no event is ever
    sent."""

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
    """ASGI middleware around the app."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        # Routes may overwrite the status: a stream may fail after its status was sent.
        outcome = scope.setdefault("state", {})
        outcome["status"] = _CLIENT_CLOSED_REQUEST

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome["status"] = message["status"]
            await send(message)

        try:
            try:
                unread = [await self._read(Request(scope, receive))]
            except ApiError as error:
                await JSONResponse(error.body(), error.status)(scope, receive, send_and_record)
                return
            except ClientDisconnect:
                return

            async def replay() -> Message:
                if not unread:
                    return await receive()
                return {"type": "http.request", "body": unread.pop(), "more_body": False}

            await self._app(scope, replay, send_and_record)
        finally:
            self._service.batcher.metrics.requests.labels(str(outcome["status"])).inc()

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raise ApiError if the API key is wrong, or the body is late or too
        large."""
        sent, key = request.headers.get("authorization", ""), self._service.key
        if key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        body, limit = bytearray(), self._service.max_body_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise ApiError(413, f"the body is larger than {limit} bytes")
        except TimeoutError as error:
            raise ApiError(408, f"the body took longer than {_BODY_S:g} s") from error
        return bytes(body)


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """The uvicorn protocol with a deadline for request headers and with JSON errors."""

    _waiting: asyncio.TimerHandle | None = None  # timer for a header

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
        """Close the connection, with an error reply unless a response is in progress. Do nothing
        if the header is late during a response."""
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


def _validation_error(request: Request, error: RequestValidationError) -> ApiError:
    """Return the error for a body that does not match its route."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        return ApiError(400, f"content-type is {kind[:100]!r}; send application/json")
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        problem, position = first["ctx"]["error"], first["loc"][-1]
        return ApiError(400, f"the body is not JSON: {problem}, at character {position}")
    # Only field names and indices are shown. pydantic also adds names of the types it tried.
    fields = itertools.takewhile(
        lambda component: str(component).isidentifier() or type(component) is int, first["loc"][1:]
    )
    field = ".".join(map(str, fields))
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        problem = "unknown field; leave it out"
    return ApiError(400, f"{field}: {problem}".lstrip(": "), param=field or None)


async def _error(request: Request, error: Exception) -> Response:
    """Reply to any error in the OpenAI format."""
    if isinstance(error, RequestValidationError):
        error = _validation_error(request, error)
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"internal error: {type(error).__name__}; see the log of the server")
    headers = {"retry-after": str(_RETRY_S)} if error.status in (429, 503) else None
    return JSONResponse(error.body(), error.status, headers)
