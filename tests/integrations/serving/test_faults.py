"""The end of ``tpkernels serve``: signals, ranks that die or hang, and a driver that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import served

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

pytestmark = pytest.mark.slow
PEER_S = 30  # after which a rank that does not answer has failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"))


class Load:
    """Clients that ask again and again, half of them for streams; what they got last."""

    def __init__(self, server: served.Server, count: int = 8) -> None:
        self.last: list[tuple[int, str]] = [(0, "")] * count
        self._server, self._stop = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def _ask(self, number: int) -> None:
        fields = {"model": self._server.name, "prompt": "on and on", "temperature": 0}
        body = {**fields, "max_tokens": 150, "stream": bool(number % 2)}
        with httpx.Client(base_url=self._server.url, timeout=120) as http:
            while not self._stop.is_set():
                try:
                    reply = http.post("/v1/completions", json=body)
                except httpx.TransportError as error:
                    self.last[number] = (0, type(error).__name__)
                    return
                self.last[number] = (reply.status_code, reply.text)
                if reply.status_code != 200 or '"error"' in reply.text:
                    return

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        time.sleep(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def errors(self) -> list[tuple[int, str]]:
        return [one for one in self.last if one[0] != 200 or '"error"' in one[1]]


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def leaving_nothing(server: served.Server) -> Iterator[list[int]]:
    """The block ends the server; its ranks must end too."""
    ranks = server.ranks()
    assert len(ranks) == 2
    yield ranks
    until(lambda: all(map(gone, ranks)), 10)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_is_killed_under_load(folder: Path, rank: int) -> None:
    with served.server(folder) as server, leaving_nothing(server) as ranks:
        with Load(server) as load:
            os.kill(ranks[rank], signal.SIGKILL)
            assert server.process.wait(30) == 1
        assert len(load.errors()) == len(load.last)
        if rank == 1:  # otherwise nobody is left to answer
            texts = [text for status, text in load.last if status]
            assert texts and all(
                "the generation failed" in text or "stopping" in text for text in texts
            )
        assert f"rank {rank} (pid {ranks[rank]})" in server.output()
        assert "killed by SIGKILL" in server.output()


def test_a_rank_is_stopped(folder: Path) -> None:
    with served.server(folder) as server, leaving_nothing(server) as ranks:
        with Load(server) as load:
            begin = time.monotonic()
            os.kill(ranks[1], signal.SIGSTOP)
            assert server.process.wait(PEER_S + 60) == 1
            assert time.monotonic() - begin > PEER_S - 5
        assert len(load.errors()) == len(load.last)
        assert "stopped by a signal" in server.output()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_before_the_server(folder: Path, sign: signal.Signals) -> None:
    """The signal goes to all of its processes, as supervisors and terminals send it."""
    with served.server(folder, "--grace", 60) as server, leaving_nothing(server):
        answers: list[Any] = []
        body = {"model": server.name, "prompt": "a", "temperature": 0, "max_tokens": 190}

        def ask() -> None:
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.3)
        os.killpg(server.process.pid, sign)
        assert server.process.wait(90) == 0, server.output()
        asking.join(10)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] > 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_requests_that_take_too_long_are_cut_off(folder: Path) -> None:
    with served.server(folder, "--grace", 0) as server, leaving_nothing(server):
        with Load(server, count=32) as load:
            begin = time.monotonic()
            assert server.stop() == 0, server.output()
            assert time.monotonic() - begin < 30
        assert "Traceback" not in server.output()
    cut_off = [(status, text) for status, text in load.errors() if status]
    assert cut_off, load.last
    for status, text in cut_off:
        assert "the server is stopping" in text, text
        assert status == 503 or text.endswith("data: [DONE]\n\n"), (status, text)


def test_a_second_signal_ends_all_at_once(folder: Path) -> None:
    with served.server(folder, "--grace", 600) as server, leaving_nothing(server) as ranks:
        os.kill(ranks[1], signal.SIGSTOP)  # so that the first one takes long
        server.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT, 15) == 130


def test_a_killed_driver_leaves_no_rank(folder: Path) -> None:
    with served.server(folder) as server, leaving_nothing(server):
        server.process.kill()


def test_an_early_signal(folder: Path) -> None:
    """While ranks load the model."""
    server = served.Server(folder)
    try:
        until(lambda: len(server.ranks()) == 2, 60)
        time.sleep(0.5)
        assert server.stop() == 0, server.output()
    finally:
        server.process.kill()
        server.process.wait(10)
        server.log.close()
