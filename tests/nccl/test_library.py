"""Which NCCL is found, and the real one on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_nccl import Build
from tpkernels import nccl


@pytest.fixture(scope="module")
def real() -> str:
    """The path of an installed NCCL wheel's library."""
    for origin, path in nccl._candidates():
        if origin == "from a wheel" and Path(path).is_file():
            return path
    pytest.skip("no NCCL wheel is installed (pip install nvidia-nccl-cu13)")


def test_versions_are_read(fake_nccl: Build) -> None:
    fake = fake_nccl()
    for number, text in {22809: "2.28.9", 23203: "2.32.3"}.items():
        fake.version(number)
        assert nccl.load(fake.path).version == text


def test_what_is_no_library(fake_nccl: Build, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"'/nowhere/libnccl\.so\.2'.*No such file"):
        nccl.load("/nowhere/libnccl.so.2")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(NotImplementedError, match=r"cannot load '.*text.so': .*"):
        nccl.load(str(tmp_path / "text.so"))
    for symbol in ("ncclGetVersion", "ncclCommInitRankConfig", "ncclRecv"):
        path = fake_nccl(without=[symbol]).path
        with pytest.raises(NotImplementedError) as caught:
            nccl.load(path)
        assert f"'{path}' does not provide {symbol}; tpkernels needs NCCL 2.14 or" in str(
            caught.value
        )


# Which one is found.


def only(monkeypatch: pytest.MonkeyPatch, *candidates: tuple[str, str]) -> None:
    monkeypatch.setattr(nccl, "_candidates", lambda: iter(candidates))


def test_the_first_that_is_new_enough_is_taken(
    fake_nccl: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, wheel = fake_nccl(without=["ncclCommFinalize"]), fake_nccl()
    wheel.version(22200)
    loaded, missing = ("loaded in this process", old.path), ("from a wheel", "/nowhere.so")
    only(monkeypatch, loaded, missing, ("from a wheel", wheel.path), loaded)
    assert nccl.load().path == wheel.path
    assert nccl.facts() == {"path": wheel.path, "version": "2.22.0", "origin": "from a wheel"}
    only(monkeypatch, loaded, loaded, missing)
    with pytest.raises(NotImplementedError) as caught:
        nccl.load()
    assert str(caught.value).count("does not provide ncclCommFinalize") == 1
    assert "/nowhere.so" in str(caught.value) and "pip install nvidia-nccl" in str(caught.value)
    assert nccl.facts() == {"unsupported": str(caught.value)}


def test_what_is_loaded_comes_first(fake_nccl: Build) -> None:
    fake = fake_nccl()
    candidates = list(nccl._candidates())
    assert ("loaded in this process", fake.path) in candidates
    origins = list(dict.fromkeys(origin for origin, _ in candidates))
    assert origins[0] == "loaded in this process" and origins[-1] == "the system's"


# The real one.


def test_the_real_library(real: str) -> None:
    loaded = nccl.load(real)
    assert Path(loaded.path).samefile(real)
    assert tuple(map(int, loaded.version.split("."))) >= (2, 14, 0)
    (code, first), (again, second) = loaded.unique_id(), loaded.unique_id()
    assert code == again == 0 and first != second and len(first) == 128
