"""The search for an NCCL library, and the real library on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_nccl import Build
from tpkernels import nccl


@pytest.fixture(scope="module")
def real_library() -> str:
    """Return the path of the library in an installed NCCL wheel."""
    for origin, path in nccl._library_candidates():
        if origin == "from a wheel" and Path(path).is_file():
            return path
    pytest.skip("no NCCL wheel is installed (pip install nvidia-nccl-cu13)")


def test_versions_are_read(fake_nccl: Build) -> None:
    fake = fake_nccl()
    for number, version in {22809: "2.28.9", 23203: "2.32.3"}.items():
        fake.version(number)
        assert nccl.load(fake.path).version == version


def test_files_that_are_not_nccl(fake_nccl: Build, tmp_path: Path) -> None:
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


# Order of the candidates.


def set_candidates(monkeypatch: pytest.MonkeyPatch, *candidates: tuple[str, str]) -> None:
    monkeypatch.setattr(nccl, "_library_candidates", lambda: iter(candidates))


def test_the_first_candidate_that_is_new_enough_is_loaded(
    fake_nccl: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, wheel = fake_nccl(without=["ncclCommFinalize"]), fake_nccl()
    wheel.version(22200)
    loaded, missing = ("loaded in this process", old.path), ("from a wheel", "/nowhere.so")
    set_candidates(monkeypatch, loaded, missing, ("from a wheel", wheel.path), loaded)
    assert nccl.load().path == wheel.path
    assert nccl.facts() == {"path": wheel.path, "version": "2.22.0", "origin": "from a wheel"}
    set_candidates(monkeypatch, loaded, loaded, missing)
    with pytest.raises(NotImplementedError) as caught:
        nccl.load()
    assert str(caught.value).count("does not provide ncclCommFinalize") == 1
    assert "/nowhere.so" in str(caught.value) and "pip install nvidia-nccl" in str(caught.value)
    assert nccl.facts() == {"unsupported": str(caught.value)}


def test_a_loaded_library_is_the_first_candidate(fake_nccl: Build) -> None:
    fake = fake_nccl()
    candidates = list(nccl._library_candidates())
    assert ("loaded in this process", fake.path) in candidates
    origins = list(dict.fromkeys(origin for origin, _ in candidates))
    assert origins[0] == "loaded in this process" and origins[-1] == "the system's"


# The real library.


def test_loading_a_real_library(real_library: str) -> None:
    loaded = nccl.load(real_library)
    assert Path(loaded.path).samefile(real_library)
    assert tuple(map(int, loaded.version.split("."))) >= (2, 14, 0)
    (code, first), (again, second) = loaded.unique_id(), loaded.unique_id()
    assert code == again == 0 and first != second and len(first) == 128
