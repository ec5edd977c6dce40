"""Shutdown of ``tpkernels serve``: signals, ranks that die or hang, and a killed driver."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import served

pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx2")

pytestmark = pytest.mark.slow
PEER_S = 30  # seconds until a rank that does not answer counts as failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served.folder(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def load(server: served.Server, count: int = 8) -> Iterator[list[tuple[int, str]]]:
    """Run clients that repeat requests, half of them streaming. Yield the last reply of each."""
    last, stop = [(0, "")] * count, threading.Event()
    fields = {"model": server.name, "prompt": "on and on", "temperature": 0, "max_tokens": 150}

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                try:
                    reply = http.post("/v1/completions", json={**fields, "stream": number % 2 > 0})
                    last[number] = (reply.status_code, reply.text)
                except httpx.TransportError as error:
                    last[number] = (0, type(error).__name__)
                if failed(last[number]):
                    return

    with ThreadPoolExecutor(count) as pool:
        clients = pool.map(ask, range(count))
        time.sleep(2)
        try:
            yield last
        finally:
            stop.set()
            list(clients)


def failed(reply: tuple[int, str]) -> bool:
    return reply[0] != 200 or '"error"' in reply[1]


def has_ended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def until(condition: Callable[[], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def all_ranks_end(server: served.Server) -> Iterator[list[int]]:
    """Yield the ranks of a server that ends within the block, and check that its ranks end."""
    ranks = server.ranks()
    assert len(ranks) == 2
    yield ranks
    until(lambda: all(map(has_ended, ranks)), 10)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_is_killed_under_load(folder: Path, rank: int) -> None:
    with served.server(folder) as server, all_ranks_end(server) as ranks:
        with load(server) as last:
            os.kill(ranks[rank], signal.SIGKILL)
            assert server.process.wait(30) == 1
        assert all(map(failed, last))
        if rank == 1:  # without rank 0, no process can answer
            bodies = [body for status, body in last if status]
            assert bodies and all(
                "the generation failed" in body or "stopping" in body for body in bodies
            )
        assert f"rank {rank} (pid {ranks[rank]})" in server.output()
        assert "killed by SIGKILL" in server.output()


def test_a_rank_is_stopped(folder: Path) -> None:
    with served.server(folder) as server, all_ranks_end(server) as ranks:
        with load(server) as last:
            begin = time.monotonic()
            os.kill(ranks[1], signal.SIGSTOP)
            assert server.process.wait(PEER_S + 60) == 1
            assert time.monotonic() - begin > PEER_S - 5
        assert all(map(failed, last))
        assert "stopped by a signal" in server.output()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_before_the_server(folder: Path, sign: signal.Signals) -> None:
    """All processes of the server get the signal, as from supervisors and terminals."""
    with served.server(folder, "--grace", 60) as server, all_ranks_end(server):
        body = {"model": server.name, "prompt": "a", "temperature": 0, "max_tokens": 190}
        with ThreadPoolExecutor(1) as pool:
            url = f"{server.url}/v1/completions"
            answer = pool.submit(httpx.post, url, json=body, timeout=120)
            time.sleep(0.3)
            os.killpg(server.process.pid, sign)
            assert server.process.wait(90) == 0, server.output()
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] > 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_requests_that_take_too_long_are_cut_off(folder: Path) -> None:
    with served.server(folder, "--grace", 0) as server, all_ranks_end(server):
        with load(server, count=32) as last:
            begin = time.monotonic()
            assert server.stop() == 0, server.output()
            assert time.monotonic() - begin < 30
        assert "Traceback" not in server.output()
    cut_off = [reply for reply in last if failed(reply) and reply[0]]
    assert cut_off, last
    for status, body in cut_off:
        assert "the server is stopping" in body, body
        assert status == 503 or body.endswith("data: [DONE]\n\n"), (status, body)


def test_a_second_signal_ends_all_processes(folder: Path) -> None:
    with served.server(folder, "--grace", 600) as server, all_ranks_end(server) as ranks:
        os.kill(ranks[1], signal.SIGSTOP)  # delays the shutdown after the first signal
        server.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT, 15) == 130


def test_a_killed_driver_leaves_no_rank(folder: Path) -> None:
    with served.server(folder) as server, all_ranks_end(server):
        server.process.kill()


def test_an_early_signal(folder: Path) -> None:
    """Stop the server while its ranks load the model."""
    server = served.Server(folder)
    try:
        until(lambda: len(server.ranks()) == 2, 60)
        time.sleep(0.5)
        assert server.stop() == 0, server.output()
    finally:
        server.process.kill()
        server.process.wait(10)
        server.log.close()
