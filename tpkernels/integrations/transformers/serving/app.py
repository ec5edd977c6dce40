"""The HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tpkernels.integrations.transformers.serving import requests
from tpkernels.integrations.transformers.serving.batcher import Answer, Batcher, Piece
from tpkernels.integrations.transformers.serving.guard import HUNG_UP, Guard
from tpkernels.integrations.transformers.serving.metrics import CONTENT_TYPE
from tpkernels.integrations.transformers.serving.prompts import Prompts
from tpkernels.integrations.transformers.serving.replies import DONE, ApiError, Replies, event

_RETRY_S = 1  # after which a refused client may try again
_SLOW_READER_S = 30.0  # in addition to the time for the answer, for a client to read it
_T = TypeVar("_T")


@dataclass(frozen=True)
class Service:
    """What is served.

    Args:
        name: of the model.
        key: see `guard.Guard`.
        most_bytes: of a request's body.
    """

    name: str
    batcher: Batcher
    prompts: Prompts
    key: str | None = None
    most_bytes: int = 1 << 20


def make_app(service: Service, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """The application."""
    app = FastAPI(title="tpkernels", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(
        Guard, metrics=service.batcher.metrics, key=service.key, most_bytes=service.most_bytes
    )
    _handle_errors(app)
    begun = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        why = service.batcher.failure()
        return JSONResponse({"status": why or "ok"}, 200 if why is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.batcher.metrics.text(), media_type=CONTENT_TYPE)

    model = {"id": service.name, "object": "model", "created": begun, "owned_by": "tpkernels"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_name(name, service)
        return model

    @app.post("/v1/completions")
    async def complete(body: requests.CompletionRequest, request: Request) -> Response:
        _check_name(body.model, service)
        prompt = await service.prompts.of_completion(body.prompt)
        return await _answer(service, request, body, prompt)

    @app.post("/v1/chat/completions")
    async def chat(body: requests.ChatRequest, request: Request) -> Response:
        _check_name(body.model, service)
        prompt = await service.prompts.of_chat(body.messages)
        return await _answer(service, request, body, prompt)

    return app


def _check_name(name: str, service: Service) -> None:
    if name != service.name:
        raise ApiError(
            404,
            f"there is no model {name[:100]!r}; this server has {service.name!r}",
            param="model",
            code="model_not_found",
        )


async def _answer(
    service: Service, request: Request, body: requests.Request, prompt: list[int]
) -> Response:
    sampling = body.sampling(service.prompts.room(prompt))
    answer = service.batcher.submit(prompt, sampling)
    pieces = answer.pieces()
    replies = Replies(isinstance(body, requests.ChatRequest), service.name)
    try:
        if not body.stream:
            text, last = await _unless_gone(request, _whole(pieces))
            answer.close()
            return JSONResponse(replies.whole(text, last.finish or "", last.usage))
        # Errors until here have a status of their own.
        first = await _unless_gone(request, anext(pieces))
    except BaseException as error:
        answer.close()
        if isinstance(error, _Gone):
            return Response(status_code=HUNG_UP)
        raise
    events = _events(request, replies, first, pieces, body.include_usage)
    return _Stream(answer, events, service.batcher.timeout + _SLOW_READER_S)


async def _whole(pieces: AsyncIterator[Piece]) -> tuple[str, Piece]:
    texts = []
    async for piece in pieces:
        texts.append(piece.text)
    return "".join(texts), piece


class _Gone(Exception):
    """The client has hung up."""


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of ``work``, which is cancelled if the client hangs up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _events(
    request: Request,
    replies: Replies,
    piece: Piece,
    more: AsyncIterator[Piece],
    include_usage: bool,
) -> AsyncIterator[str]:
    """The events of a stream. ``request.state.status`` tells the metrics how it ended."""
    request.state.status = HUNG_UP
    yield replies.start()
    try:
        while piece.finish is None:
            yield replies.piece(piece.text, None)
            piece = await anext(more)
        if piece.text:
            yield replies.piece(piece.text, None)
        yield replies.piece("", piece.finish)
        if include_usage:
            yield replies.usage(piece.usage)
        request.state.status = 200
    except ApiError as error:
        request.state.status = error.status
        yield event(error.body())
    yield DONE


class _Stream(StreamingResponse):
    """Closes the answer however the response ends, even if its first event is never asked for."""

    def __init__(self, answer: Answer, events: AsyncIterator[str], timeout: float) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self._answer, self._timeout = answer, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(super().__call__(scope, receive, send), self._timeout)
        finally:
            self._answer.close()


def _handle_errors(app: FastAPI) -> None:
    def reply(error: ApiError) -> Response:
        headers = {"retry-after": str(_RETRY_S)} if error.status in (429, 503) else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return reply(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        what = first["msg"].removeprefix("Value error, ")
        return reply(ApiError(400, f"{where}: {what}".lstrip(": "), param=where or None))

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> Response:
        return reply(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        return reply(ApiError(500, f"internal error: {type(error).__name__}"))
