"""Requests of clients that disconnect, and requests in a generation that fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.support.serving import NAME, FakeManager, make_test_app, service, tokenize
from tpkernels.integrations.transformers.serving import app as serving_app
from tpkernels.integrations.transformers.serving.app import Protocol, Service

LONG = "abcdefghij" * 4


class Client:
    """A connection to the app that the test can cut."""

    def __init__(self, app: Any, *, reads: bool = True, **fields: Any) -> None:
        body = {"model": NAME, "prompt": "a", "max_tokens": 40, **fields}
        self.cut, self.reads = asyncio.Event(), asyncio.Event()
        if reads:
            self.reads.set()
        self.sent: list[Any] = []
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            # The version that uvicorn sends. With it, Starlette listens for disconnects.
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        self.done = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.cut.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def received(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def metric(app_service: Service, name: str) -> float:
    for line in app_service.batcher.metrics.render().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return 0.0


def start_app(manager: FakeManager, **options: Any) -> tuple[Service, Any]:
    app_service = service(manager, **options)
    app_service.batcher.start()
    return app_service, make_test_app(app_service)


async def wait_until_done(*clients: Client) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.done for client in clients))


@pytest.mark.parametrize(("stream", "forgetful"), [(False, False), (True, False), (True, True)])
def test_a_client_hangs_up(stream: bool, forgetful: bool) -> None:
    """Cut the connection during a generation. The request is cancelled, also if the manager loses
    the first cancellation (``forgetful``)."""

    async def test() -> None:
        manager = FakeManager(
            tokenize(LONG), paused=True, tokens_before_pause=3, forgetful=forgetful
        )
        app_service, app = start_app(manager)
        client = Client(app, stream=stream)
        await until(lambda: metric(app_service, "tpkernels_requests_running") == 1)
        if stream:
            await until(lambda: "a" in client.received)
        client.cut.set()
        await wait_until_done(client)
        assert set(manager.cancelled) == {"request-0"}
        assert metric(app_service, "tpkernels_requests_running") == 0
        assert metric(app_service, 'tpkernels_requests_total{status="499"}') == 1
        # The slot is free, and new requests are served.
        manager.paused = False
        if forgetful:  # the next output of transformers cancels the request again
            await until(lambda: len(manager.cancelled) >= 2)
        await wait_until_done(Client(app, stream=stream))
        assert metric(app_service, 'tpkernels_requests_total{status="200"}') == 1

    asyncio.run(test())


def test_a_slow_reader_holds_no_slot() -> None:
    """A request ends in the manager before its client reads the answer. A second client is then
    served, although only one request may run."""

    async def test() -> None:
        app_service, app = start_app(FakeManager(tokenize(LONG)), max_requests=1)
        slow, count = Client(app, reads=False, stream=True), len(tokenize(LONG)) - 1
        await until(lambda: metric(app_service, "tpkernels_generated_tokens_total") == count)
        assert not slow.done.done()
        other = Client(app)
        await wait_until_done(other)
        assert other.sent[0]["status"] == 200
        slow.reads.set()
        await wait_until_done(slow)
        chunks = [json.loads(line[6:]) for line in slow.received.split("\n\n")[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == LONG

    asyncio.run(test())


def test_a_generation_that_fails_ends_all_answers() -> None:
    async def test() -> None:
        manager = FakeManager(tokenize(LONG), paused=True, tokens_before_pause=3)
        app_service, app = start_app(manager)
        clients = unstreamed, streamed = [Client(app, stream=stream) for stream in (False, True)]
        await until(lambda: metric(app_service, "tpkernels_requests_running") == 2)
        await until(lambda: "a" in streamed.received)
        manager.background_thread_status.fatal_error = RuntimeError("a rank died")
        assert app_service.batcher.failure() == "RuntimeError: a rank died"
        app_service.batcher.fail(503, "the server is stopping")
        late = Client(app)
        await wait_until_done(*clients, late)
        assert all("the server is stopping" in client.received for client in clients)
        assert unstreamed.sent[0]["status"] == late.sent[0]["status"] == 503
        assert streamed.received.endswith("data: [DONE]\n\n")

    asyncio.run(test())


def test_late_and_malformed_headers() -> None:
    """A client that sends its header slowly or not at all, also after an answer, gets status 408
    and is disconnected. A client that does not send HTTP gets a JSON error."""

    import uvicorn

    async def test() -> list[tuple[bytes, Any]]:
        app = make_test_app(service(FakeManager(tokenize("b"))))
        config = uvicorn.Config(app, http=Protocol, port=0, log_level="critical")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        [listening] = server.servers[0].sockets
        good = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

        async def replies(*chunks: bytes) -> list[tuple[bytes, Any]]:
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            for chunk in chunks:
                writer.write(chunk)
                await asyncio.sleep(0.02)
            received = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            _, *responses = received.split(b"HTTP/1.1 ")
            return [
                (response[:3], json.loads(response.partition(b"\r\n\r\n")[2]))
                for response in responses
            ]

        results = await replies(b"GET / HT", *[b"x"] * 3)
        results += await replies()
        results += (await replies(good, b"GET / HT"))[1:]
        results += await replies(b"nonsense\r\n\r\n")
        server.should_exit = True
        await serving
        return results

    with mock.patch.object(serving_app, "_HEADER_S", 0.3):
        results = asyncio.run(test())
    assert [status for status, _ in results] == [b"408", b"408", b"408", b"400"]
    messages = [body["error"]["message"] for _, body in results]
    assert messages[0] == "the header took longer than 0.3 s" and "Invalid HTTP" in messages[-1]
