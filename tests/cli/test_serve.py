"""``tpkernels serve``: refusals before a rank starts, and memory limits of the ranks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import invoke

pytest.importorskip("transformers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tpkernels.integrations.transformers.serving import server
from tpkernels.integrations.transformers.serving.server import limits


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a rank starts. A test of refusals would otherwise be slow, and pass."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(server, "Ranks", start)
    monkeypatch.setattr(server, "fork_server", lambda *_: None)


def refusal(*args: object) -> str:
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
        (("--host", "no.such.host.invalid"), "cannot resolve --host no.such.host.invalid"),
    ],
)
def test_bad_options(tmp_path: Path, args: tuple[object, ...], message: str) -> None:
    assert message in refusal("--model", tmp_path, "--port", 0, *args)
    assert "which does not exist; pass a local folder" in refusal("--model", tmp_path / "nothing")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        message = refusal("--model", tmp_path, "--port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message


def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refusal("--model", tmp_path)


@pytest.mark.parametrize(
    ("key", "message"),
    [(b" \n", "is empty; write the API key"), (b"\xff", "not ASCII"), (b"k" * 5000, "larger than")],
)
def test_an_unusable_key(tmp_path: Path, key: bytes, message: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    assert message in refusal("--model", tmp_path, "--api-key-file", path)


def test_environment_variables_override_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    assert limits()["LRU_CACHE_CAPACITY"] == "7"
