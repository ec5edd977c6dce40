"""A libnccl that tests control. Built once from fake_nccl.cpp; each copy has its own state."""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.paths import NATIVE

SOURCE = NATIVE / "nccl" / "fake_nccl.cpp"
SUCCESS, INVALID_ARGUMENT, REMOTE_ERROR, IN_PROGRESS, TIMEOUT = 0, 4, 6, 7, 8


class Config(ctypes.Structure):
    """ncclConfig_t, as NCCL 2.27 reads it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_void_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_void_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    )


class Fake:
    """One loaded copy: configures its behaviour, and reads which calls it received."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        for function in ("fake_log", "fake_name"):
            getattr(self._library, function).restype = ctypes.c_char_p
        for function in ("fake_config", "fake_id"):
            getattr(self._library, function).restype = ctypes.c_void_p

    def version(self, value: int) -> None:
        self._library.fake_version(value)

    def result(self, function: str, code: int) -> None:
        """Sets what a function returns from now on."""
        self._library.fake_result(function.encode(), code)

    def delay(self, function: str, seconds: float) -> None:
        """Sets how long a function takes from now on."""
        self._library.fake_delay(function.encode(), ctypes.c_double(seconds))

    def progress(self, polls: int) -> None:
        """Sets how many polls find a call in progress; -1: all."""
        self._library.fake_progress(polls)

    def asynchronous(self, code: int) -> None:
        """Sets what polls return afterwards."""
        self._library.fake_async(code)

    def finish(self) -> None:
        """Ends the call in progress."""
        self._library.fake_finish()

    def calls(self, function: str) -> int:
        return int(self._library.fake_calls(function.encode()))

    @property
    def misuse(self) -> int:
        """Calls on a communicator that no longer existed, or had another call in progress."""
        return int(self._library.fake_misuse())

    @property
    def alive(self) -> int:
        """Communicators neither aborted nor destroyed."""
        return int(self._library.fake_alive())

    @property
    def depth(self) -> int:
        """Groups that this thread has open."""
        return int(self._library.fake_depth())

    @property
    def log(self) -> list[str]:
        return str(self._library.fake_log().decode()).splitlines()

    @property
    def config(self) -> Config:
        return Config.from_address(self._library.fake_config())

    @property
    def name(self) -> str:
        return str(self._library.fake_name().decode())

    @property
    def unique_id(self) -> bytes:
        return ctypes.string_at(self._library.fake_id(), 128)


Build = Callable[..., Fake]


def make_build(folder: Path) -> Build:
    """``build(without=[...])``: a new copy, some of whose symbols are hidden."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]}")
    options = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    compiled, whole = folder / "fake_nccl.o", folder / "whole.so"
    subprocess.run([*compiler, *options, "-c", str(SOURCE), "-o", str(compiled)], check=True)

    def link(target: Path, without: Sequence[str]) -> None:
        script = target.with_suffix(".map")
        hidden = f"local: {'; '.join(without)};" if without else ""
        script.write_text(f"{{ global: *; {hidden} }};")
        shared = ["-shared", "-pthread", f"-Wl,--version-script={script}"]
        subprocess.run([*compiler, *shared, str(compiled), "-o", str(target)], check=True)

    link(whole, [])
    numbers = itertools.count()

    def build(without: Sequence[str] = ()) -> Fake:
        target = folder / f"{next(numbers)}-libnccl.so.2"
        if without:
            link(target, without)
        else:
            shutil.copy(whole, target)
        return Fake(str(target))

    return build
