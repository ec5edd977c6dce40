"""Clients that go away, and a generation that fails: what becomes of their requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.support.serving import NAME, FakeManager, app_of, service, tokens_of
from tpkernels.integrations.transformers.serving import app as serving_app
from tpkernels.integrations.transformers.serving.app import Protocol, Service

LONG = "abcdefghij" * 4


class Client:
    """One connection to the app, which the test can cut."""

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
            # uvicorn's: Starlette then listens for the end of the connection.
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
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def metric(what: Service, name: str) -> float:
    for line in what.batcher.metrics.text().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return 0.0


def started(manager: FakeManager, **options: Any) -> tuple[Service, Any]:
    what = service(manager, **options)
    what.batcher.start()
    return what, app_of(what)


async def ended(*clients: Client) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*(client.done for client in clients))


@pytest.mark.parametrize(("stream", "forgetful"), [(False, False), (True, False), (True, True)])
def test_a_client_hangs_up(stream: bool, forgetful: bool) -> None:
    """``forgetful``: its cancellation is lost, and repeated."""

    async def test() -> None:
        manager = FakeManager(tokens_of(LONG), held=True, before_hold=3, forgetful=forgetful)
        what, app = started(manager)
        client = Client(app, stream=stream)
        await until(lambda: metric(what, "tpkernels_requests_running") == 1)
        if stream:
            await until(lambda: "a" in client.text)
        client.cut.set()
        await ended(client)
        assert set(manager.cancelled) == {"request-0"}
        assert metric(what, "tpkernels_requests_running") == 0
        assert metric(what, 'tpkernels_requests_total{status="499"}') == 1
        # The place is free, and the others are served.
        manager.held = False
        if forgetful:  # transformers went on: its next output cancels the request once more
            await until(lambda: len(manager.cancelled) >= 2)
        await ended(Client(app, stream=stream))
        assert metric(what, 'tpkernels_requests_total{status="200"}') == 1

    asyncio.run(test())


def test_a_slow_reader_holds_no_place() -> None:
    """The manager is done with its request long before the client has read the answer."""

    async def test() -> None:
        what, app = started(FakeManager(tokens_of(LONG)), most=1)
        slow, count = Client(app, reads=False, stream=True), len(tokens_of(LONG)) - 1
        await until(lambda: metric(what, "tpkernels_generated_tokens_total") == count)
        assert not slow.done.done()
        other = Client(app)
        await ended(other)
        assert other.sent[0]["status"] == 200
        slow.reads.set()
        await ended(slow)
        pieces = [json.loads(line[6:]) for line in slow.text.split("\n\n")[:-2]]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == LONG

    asyncio.run(test())


def test_a_generation_that_fails_ends_all_answers() -> None:
    async def test() -> None:
        manager = FakeManager(tokens_of(LONG), held=True, before_hold=3)
        what, app = started(manager)
        clients = whole, streamed = [Client(app, stream=stream) for stream in (False, True)]
        await until(lambda: metric(what, "tpkernels_requests_running") == 2)
        await until(lambda: "a" in streamed.text)
        manager.background_thread_status.fatal_error = RuntimeError("a rank died")
        assert what.batcher.failure() == "RuntimeError: a rank died"
        what.batcher.fail(503, "the server is stopping")
        late = Client(app)
        await ended(*clients, late)
        assert all("the server is stopping" in client.text for client in clients)
        assert whole.sent[0]["status"] == late.sent[0]["status"] == 503
        assert streamed.text.endswith("data: [DONE]\n\n")

    asyncio.run(test())


def test_headers_that_are_late_or_no_http() -> None:
    """A client that sends its header slowly, or nothing, also after an answer, is told so and cut
    off; one that speaks no HTTP gets JSON, too."""

    import uvicorn

    async def test() -> list[tuple[bytes, Any]]:
        app = app_of(service(FakeManager(tokens_of("b"))))
        config = uvicorn.Config(app, http=Protocol, port=0, log_level="critical")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        [listening] = server.servers[0].sockets
        good = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

        async def replies(*parts: bytes) -> list[tuple[bytes, Any]]:
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.02)
            received = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            _, *each = received.split(b"HTTP/1.1 ")
            return [(one[:3], json.loads(one.partition(b"\r\n\r\n")[2])) for one in each]

        found = await replies(b"GET / HT", *[b"x"] * 3)
        found += await replies()
        found += (await replies(good, b"GET / HT"))[1:]
        found += await replies(b"nonsense\r\n\r\n")
        server.should_exit = True
        await serving
        return found

    with mock.patch.object(serving_app, "_HEADER_S", 0.3):
        found = asyncio.run(test())
    assert [status for status, _ in found] == [b"408", b"408", b"408", b"400"]
    texts = [reply["error"]["message"] for _, reply in found]
    assert texts[0] == "the header took longer than 0.3 s" and "Invalid HTTP" in texts[-1]
