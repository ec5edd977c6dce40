"""What holds for every request, before a route sees it: its key, the size of its body, its place in
the metrics. A middleware of ASGI."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpkernels.integrations.transformers.serving.metrics import Metrics
from tpkernels.integrations.transformers.serving.replies import ApiError

HUNG_UP = 499  # nginx's status for a client that has gone
_BODY_S = 30.0  # for a client to send its body


class Guard:
    """Wraps the app.

    Args:
        key: what clients must send as ``Authorization: Bearer KEY``; None lets all in.
        most_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, key: str | None, most_bytes: int) -> None:
        self._app, self._metrics, self._most_bytes = app, metrics, most_bytes
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        # Routes may overwrite it: a stream may fail after its status has been sent.
        outcome = scope.setdefault("state", {})
        outcome["status"] = HUNG_UP

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome["status"] = message["status"]
            await send(message)

        try:
            await self._check_key(scope)
            body = await self._body(receive)
        except ApiError as error:
            reply = JSONResponse(error.body(), error.status)
            await reply(scope, receive, noting)
        else:
            if body is not None:
                await self._app(scope, _Replay(body, receive), noting)
        finally:
            self._metrics.requests.labels(str(outcome["status"])).inc()

    async def _check_key(self, scope: Scope) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise ApiError(401, "wrong API key", code="invalid_api_key")

    async def _body(self, receive: Receive) -> bytes | None:
        """The body; None if the client has gone."""
        try:
            return await asyncio.wait_for(self._read(receive), _BODY_S)
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body took longer than {_BODY_S:g} s") from error

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._most_bytes:
                raise ApiError(413, f"the body has more than {self._most_bytes} bytes")
            if not message.get("more_body", False):
                return bytes(body)


class _Replay:
    """``receive`` of a request whose body has been read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
