"""Damaged YAML for `bench --config` and damaged tuning files: refused or ignored in one line."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.bench.test_damaged import SEED, nothing_runs
from tests.planning.test_tuning import spec
from tests.planning.test_tuning_store import MACHINE, TABLE, cache
from tests.support.damage import altered, faults, invoke, unusable
from tpkernels.planning import store
from tpkernels.planning.choose import Means, choose

__all__ = ["cache", "nothing_runs"]  # fixtures
SWEEP = {
    "op": ["all_gather_matmul", "all_reduce"],
    "shape": [[8, 16, 32], "16,32,64"],
    "bytes": "4K,1M",
    "tp": [2],
    "dtype": "fp32",
    "algorithm": ["auto"],
    "repeat": 6,
    "seconds": 1.5,
    "quick": True,
    "model": "llama3-8b",
    "m": [16],
}
_LAUGHS = "a0: &a0 [x]" + "".join(f"\na{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))
_MERGED = "a0: &a0 {x: 1}" + "".join(
    f"\na{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 18)
)
REFUSED = [
    "op: [", "", "- op", "\0", "op: \x1b[2J", "? [op]\n: 1", "op: &a [*a]",
    "op: !!python/object/apply:os.getcwd []", "tp: !!int ''", "m: 2001-99-99", "tp: " + "9" * 5000,
    "shape: '" + "9" * 5000 + ",2,2'", "bytes: '" + "9" * 5000 + "'", "repeat: " + "9" * 5000,
    "seconds: .inf", "seconds: .nan", "{op: all_reduce, tp: 5000}", "tp: ²", "shape: 1_0,2,2",
    "tp: [[[2]]]", "tp: {2: 2}", "tp: true", "warm: yes please", "[" * 100_000,
    "tp: " + "[" * 900 + "]" * 900, "op: " + "x" * 100_000, _LAUGHS, _MERGED, "\x1b[31m: 1",
    "op: 'a\\x1b[31mb'", "? " + "x" * 5000 + "\n: 1",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:25]))
@pytest.mark.timeout(20)
def test_yaml_that_cannot_be_used_is_refused(tmp_path: Path, nothing_runs: None, text: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    assert not faults(invoke("bench", "--config", str(path)), (2,))


def test_yaml_has_no_aliases(tmp_path: Path, nothing_runs: None) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("tp: &ranks [2]\nm: *ranks")
    shown = invoke("bench", "--config", str(path)).output
    assert "is not YAML: aliases (*name) are not supported" in shown


def yaml_kinds(pick: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damaged YAML; JSON is YAML too."""
    yield from altered(SWEEP, pick)
    yield from unusable(SWEEP, pick)
    text = yaml.safe_dump(SWEEP).encode()
    for _ in range(60):
        at = pick.randrange(len(text))
        yield f"a byte at {at}", text[:at] + pick.randbytes(1) + text[at + 1 :]
        yield f"cut at {at}", text[:at]


@pytest.mark.slow
def test_no_yaml_ends_in_a_traceback(tmp_path: Path, nothing_runs: None) -> None:
    path, codes = tmp_path / "sweep.yaml", Counter[int]()
    for what, content in list(yaml_kinds(random.Random(SEED)))[::3]:
        path.write_bytes(content)
        ended = invoke("bench", "--config", str(path))
        assert not faults(ended, (0, 2)), what
        codes[ended.exit_code] += 1
    assert codes[0] > 6 and codes[2] > 50


def test_yaml_that_is_no_file_is_refused(tmp_path: Path, nothing_runs: None) -> None:
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "nowhere"):
        assert not faults(invoke("bench", "--config", str(path)), (2,))


@pytest.mark.thorough
def test_no_tuning_file_ends_in_a_traceback(cache: Path) -> None:
    """A file is used, or ignored with one printable warning."""
    store.update(MACHINE, *TABLE.measurements)
    tree, pick = json.loads(cache.read_bytes()), random.Random(SEED)
    used = 0
    for what, content in itertools.chain(altered(tree, pick), unusable(tree, pick)):
        cache.write_bytes(content)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            table = store.load_or_warn(MACHINE)
        messages = [str(one.message) for one in raised]
        assert all(message.isprintable() and len(message) < 1000 for message in messages), what
        assert len(raised) == 1 or (not raised and table.measurements is not None), what
        used += not raised
        plan = choose(spec(64).problem(2), Means(shared_memory=True), tuned=table)
        assert plan.reason.isprintable()
    assert used > 5
