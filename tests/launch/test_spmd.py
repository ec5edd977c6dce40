"""`tpkernels.spmd`: closures and lambdas on ranks with a mesh, in scripts without a main guard."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.processes import python_output
from tpkernels.launch import RankError


def test_the_store_listens_on_loopback_only(ranks: RanksFixture) -> None:
    port = f":{ranks(2)._store.port:04X}"
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    sockets = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    listening = [address for _, address, _, state, *_ in sockets if state == "0A"]
    addresses = [address.removesuffix(port) for address in listening if address.endswith(port)]
    assert addresses == ["0100007F"]  # 127.0.0.1 on a little-endian machine


def test_a_closure_on_a_mesh() -> None:
    """The closure receives an argument and a keyword, reads a variable of the caller, and returns
    tensors."""
    offset = torch.tensor([10.0])

    def work(mesh: Any, x: torch.Tensor, *, factor: int) -> Any:
        y = tpkernels.all_reduce((x + offset) * dist.get_rank(), mesh["y"])
        return mesh.mesh_dim_names, list(mesh.get_coordinate()), factor * y

    results = tpkernels.spmd(work, 4, (2, 2), torch.ones(2), factor=3)
    assert [coordinate for _, coordinate, _ in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert results[0][0] == ("x", "y")
    assert [y.tolist() for *_, y in results] == [[33.0] * 2] * 2 + [[165.0] * 2] * 2


def test_attributes_with_the_names_of_submodules() -> None:
    """The closure reads an attribute ``config``. cloudpickle then sends `torch.distributed.config`,
    which is not a plain module."""
    box = SimpleNamespace(config=7)
    assert tpkernels.spmd(lambda mesh: box.config + dist.get_rank(), 1) == [7]


IN_THREADS = """
import os
from concurrent.futures import ThreadPoolExecutor
import tpkernels

def work(mesh):
    return mesh.size(), os.environ["OMP_NUM_THREADS"]

os.environ["OMP_NUM_THREADS"] = "3"
if __name__ == "__main__":
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(tpkernels.spmd, work, 1) for _ in range(3)]
    print([call.result() for call in calls], os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
def test_threads_start_ranks_simultaneously(tmp_path: Path) -> None:
    """Three threads make the first `spmd` calls of a process at the same time."""
    path = tmp_path / "script.py"
    path.write_text(IN_THREADS)
    assert python_output(path) == f"{[[(1, '1')]] * 3} 3\n"


SCRIPT = """
import torch.distributed as dist
import tpkernels

class Box:
    def __init__(self, value): self.value = value

boxes = tpkernels.spmd(lambda mesh: Box(dist.get_rank() + mesh.size()), 2, mesh_dim_names=["tp"])
print([box.value for box in boxes], all(type(box) is Box for box in boxes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_a_script_needs_no_guard(tmp_path: Path, how: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with path.open() as script:
        printed = python_output(*([path] if how == "a file" else ["-"]), stdin=script)
    assert printed.splitlines() == ["[2, 3] True"]


def test_errors_come_with_the_tracebacks_of_the_ranks() -> None:
    def work(mesh: Any) -> None:
        if mesh.get_local_rank() == 1:
            raise ArithmeticError("on the second rank")
        raise ValueError("on others")

    with pytest.raises(RankError) as caught:
        tpkernels.spmd(work, 3)
    message = str(caught.value)
    assert re.search(r"rank 1 \(pid(.|\n)*in work(.|\n)*on the second rank\n", message)
    assert message.count("on others") == 2  # source line and error of rank 0
    assert message.endswith(" s: same error as rank 0")
    with pytest.raises(RankError, match="cannot pickle"):
        tpkernels.spmd(lambda mesh: threading.Lock(), 1)


def test_semaphores_of_a_rank_are_unlinked() -> None:
    """A rank leaves a semaphore open, as tqdm does. Python would otherwise warn of a leaked
    semaphore when the script ends."""

    def create_semaphore(mesh: Any) -> str:
        import multiprocessing

        lock = multiprocessing.get_context("spawn").Lock()
        dist.semaphore = lock  # type: ignore[attr-defined]
        return str(lock._semlock.name)  # type: ignore[attr-defined]

    [name] = tpkernels.spmd(create_semaphore, 1)
    assert not Path(f"/dev/shm/sem.{name[1:]}").exists()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4, (2, 3)), {}, ValueError, "has 6 ranks, but nprocs is 4"),
        ((2, (-1, -2)), {}, ValueError, r"mesh_shape is \(-1, -2\); .*each at least 1"),
        ((0,), {}, ValueError, "nprocs is 0; pass the number of ranks"),
        (
            (2, "text"),
            {},
            TypeError,
            r"mesh_shape is 'text'; pass the sizes .* such as \(2,\), or None",
        ),
        ((2,), {"device": "cuda"}, ValueError, "torch sees no GPU"),
        ((2,), {"device": "tpu"}, ValueError, "device is 'tpu'; expected 'cpu' or 'cuda'"),
        (
            (4, (2, 2)),
            {"mesh_dim_names": ["x"]},
            ValueError,
            r"mesh_dim_names is \('x',\), but mesh_shape \(2, 2\) has 2 dims",
        ),
        ((1, None, threading.Lock()), {}, TypeError, "cannot be copied to the ranks"),
    ],
)
def test_bad_input_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr("tpkernels.launch.spmd.Ranks", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        tpkernels.spmd(print, *arguments, **options)
    with pytest.raises(TypeError, match="fn is 7; pass the function itself"):
        tpkernels.spmd(7, 2)  # type: ignore[arg-type]
