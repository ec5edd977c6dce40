"""C++ exceptions of other extensions, to which the translators of this one are no concern."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path

import pytest

from tests.support.cxx import compiled

NEIGHBOUR = """
#include <pybind11/pybind11.h>

#include <system_error>

PYBIND11_MODULE(neighbour, m) {
  m.def("fail", [] { throw std::system_error(2, std::generic_category(), "of a neighbour"); });
}
"""


@pytest.mark.thorough
def test_those_of_a_neighbour_stay_as_they_are(cxx_cache: Path) -> None:
    """Extensions that were built with one version of pybind11 share what it registers."""
    pybind11 = pytest.importorskip("pybind11")
    source = cxx_cache / "neighbour.cpp"
    source.write_text(NEIGHBOUR)
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", *includes]
    name = f"neighbour{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = str(compiled(cxx_cache, name, [*flags, source]))
    loader = importlib.machinery.ExtensionFileLoader("neighbour", path)
    spec = importlib.util.spec_from_file_location("neighbour", path, loader=loader)
    assert spec is not None
    neighbour = importlib.util.module_from_spec(spec)
    loader.exec_module(neighbour)
    with pytest.raises(RuntimeError, match="of a neighbour"):
        neighbour.fail()
