"""The exception translators of this extension do not affect exceptions of other extensions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path

import pytest

from tests.support.cxx import compile_cached

NEIGHBOUR = """
#include <pybind11/pybind11.h>

#include <system_error>

PYBIND11_MODULE(neighbour, m) {
  m.def("fail", [] { throw std::system_error(2, std::generic_category(), "of a neighbour"); });
}
"""


@pytest.mark.thorough
def test_exceptions_of_a_second_extension_are_unchanged(cxx_cache: Path) -> None:
    """Extensions built with the same pybind11 version share registered translators."""
    pybind11 = pytest.importorskip("pybind11")
    source = cxx_cache / "neighbour.cpp"
    source.write_text(NEIGHBOUR)
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
    name = f"neighbour{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = str(compile_cached(cxx_cache, name, [*flags, source]))
    loader = importlib.machinery.ExtensionFileLoader("neighbour", path)
    spec = importlib.util.spec_from_file_location("neighbour", path, loader=loader)
    assert spec is not None
    neighbour = importlib.util.module_from_spec(spec)
    loader.exec_module(neighbour)
    with pytest.raises(RuntimeError, match="of a neighbour"):
        neighbour.fail()
