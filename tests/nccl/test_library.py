"""Which NCCL is found, and the real one on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_nccl import Build
from tpkernels import nccl

REQUIRED = [
    *("GetUniqueId", "GetErrorString", "GetLastError", "CommInitRankConfig", "CommGetAsyncError"),
    *("CommAbort", "CommFinalize", "CommDestroy", "AllGather", "ReduceScatter", "AllReduce"),
    *("Broadcast", "Send", "Recv", "GroupStart", "GroupEnd"),
]


@pytest.fixture(scope="module")
def real() -> str:
    """The path of an installed NCCL wheel's library."""
    wheels = [path for path in nccl._wheels() if path.is_file()]
    if not wheels:
        pytest.skip("no NCCL wheel is installed (pip install nvidia-nccl-cu13)")
    return str(wheels[0])


def test_a_library_without_a_required_symbol_is_too_old(fake_nccl: Build) -> None:
    for symbol in REQUIRED:
        fake = fake_nccl(without=[f"nccl{symbol}"])
        fake.version(21212)
        with pytest.raises(NotImplementedError) as caught:
            nccl.load(fake.path)
        text = f"NCCL 2.12.12 ({fake.path}) is too old: it has no nccl{symbol}, which was added"
        assert text in str(caught.value)
        assert "tpkernels needs NCCL 2.14.0 or newer" in str(caught.value)


def test_versions_are_read(fake_nccl: Build) -> None:
    numbers = {22809: "2.28.9", 23203: "2.32.3", 2804: "2.8.4", 21005: "2.10.5"}
    fake = fake_nccl()
    for number, text in numbers.items():
        fake.version(number)
        assert nccl.load(fake.path).version == text


def test_what_is_no_library(fake_nccl: Build, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"'/nowhere/libnccl\.so\.2'.*No such file"):
        nccl.load("/nowhere/libnccl.so.2")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(NotImplementedError, match=r"cannot load '.*text.so': .*"):
        nccl.load(str(tmp_path / "text.so"))
    with pytest.raises(NotImplementedError, match="is not NCCL: ncclGetVersion is missing"):
        nccl.load(fake_nccl(without=["ncclGetVersion"]).path)


# Which one is found.


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The candidates, instead of those of this machine."""
    files: dict[str, list[str]] = {"loaded": [], "wheels": []}

    def paths(place: str) -> Iterator[Path]:
        return map(Path, files[place])

    monkeypatch.setattr(nccl, "_loaded", lambda: paths("loaded"))
    monkeypatch.setattr(nccl, "_wheels", lambda: paths("wheels"))
    monkeypatch.setattr(nccl, "SONAME", "libnccl-of-nobody.so.2")
    return files


def test_the_loaded_one_comes_first(fake_nccl: Build, places: dict[str, list[str]]) -> None:
    loaded, wheel = fake_nccl(), fake_nccl()
    wheel.version(22200)
    places["wheels"] = [wheel.path]
    assert (nccl.facts()["path"], nccl.facts()["origin"]) == (wheel.path, "from a wheel")
    assert (nccl.facts()["version"], nccl.load().version) == ("2.22.0", "2.22.0")
    places["loaded"] = [loaded.path]
    facts = nccl.facts()
    assert (facts["path"], facts["origin"]) == (loaded.path, "loaded in this process")


def test_one_that_is_too_old_is_passed_over(fake_nccl: Build, places: dict[str, list[str]]) -> None:
    old, wheel = fake_nccl(without=["ncclCommFinalize"]), fake_nccl()
    places |= {"loaded": [old.path], "wheels": ["/nowhere/libnccl.so.2", wheel.path]}
    assert nccl.load().path == wheel.path
    places["wheels"] = []
    with pytest.raises(NotImplementedError) as caught:
        nccl.load()
    for part in (old.path, "no ncclCommFinalize", "libnccl-of-nobody", "pip install nvidia-nccl"):
        assert part in str(caught.value)
    assert nccl.facts() == {"unsupported": str(caught.value)}


def test_what_is_loaded_is_seen(fake_nccl: Build) -> None:
    fake = fake_nccl()
    assert Path(fake.path) in list(nccl._loaded())


# The real one.


def test_the_real_library(real: str) -> None:
    loaded = nccl.load(real)
    assert Path(loaded.path).samefile(real)
    assert tuple(map(int, loaded.version.split("."))) >= (2, 14, 0)
    first, second = loaded.unique_id(), loaded.unique_id()
    assert first != second and len(first) == 128
