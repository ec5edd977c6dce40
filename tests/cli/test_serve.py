"""``tpkernels serve``: what is refused before a rank starts, and the memory of ranks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_cli import invoke
from tpkernels.launch import Ranks

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tpkernels.integrations.transformers.serving import server
from tpkernels.integrations.transformers.serving.server import limits


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts would make a test of refusals slow, and pass."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(server, "Ranks", start)
    monkeypatch.setattr(server, "fork_server", lambda *_: None)


def refused(*args: object) -> str:
    result = invoke("serve", *args)
    assert result.exit_code == 2, result.output or result.exception
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tp", 0), "--tp is 0; it must be at least 1"),
        (("--threads", 5000), "--threads is 5000; it must be at most 1024"),
        (("--max-waiting", -1), "--max-waiting is -1"),
        (("--max-length", 1), "--max-length is 1; it must be at least 2"),
        (("--port", 65536), "--port is 65536; it must be 0 to 65535"),
        (("--api-key-file", "none"), "cannot read 'none'"),
        (("--host", "no.such.host.invalid"), "--host is no.such.host.invalid"),
    ],
)
def test_bad_options(tmp_path: Path, args: tuple[object, ...], message: str) -> None:
    assert message in refused("--model", tmp_path, "--port", 0, *args)
    assert "there is no" in refused("--model", tmp_path / "nothing")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused("--model", tmp_path, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message


def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refused("--model", tmp_path)


@pytest.mark.parametrize(
    ("key", "message"), [(b" \n", "has no key"), (b"\xff", "not ASCII"), (b"k" * 5000, "more than")]
)
def test_a_key_that_cannot_be_used(tmp_path: Path, key: bytes, message: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    assert message in refused("--model", tmp_path, "--api-key-file", path)


def growth_job() -> tuple[float, float]:
    """MiB by which a rank grows in torch's products of 300 numbers of rows, by four weights; and in
    the same again, with as many rows."""
    weights = [torch.ones(n, 32, dtype=torch.bfloat16).t() for n in (48, 64, 96, 128)]
    sizes = [_resident()]
    for _ in range(2):
        for rows in range(1, 301):
            for w in weights:
                torch.mm(torch.ones(rows, 32, dtype=torch.bfloat16), w)
        sizes.append(_resident())
    return sizes[1] - sizes[0], sizes[2] - sizes[1]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_batches_of_all_sizes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in limits():
        monkeypatch.delenv(name, raising=False)
    grown = {}
    for what, env in (("unbounded", {}), ("bounded", limits())):
        with Ranks(1, env=env) as ranks:
            grown[what], again = ranks.run(growth_job, timeout=120)[0]
            assert again < 0.2 * grown[what] + 4, (what, grown, again)
    if grown["unbounded"] < 50:
        pytest.skip(f"this oneDNN keeps little: {grown}")
    assert grown["bounded"] < 0.5 * grown["unbounded"], grown


def test_the_user_sets_other_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert limits()["LRU_CACHE_CAPACITY"] == "7"
