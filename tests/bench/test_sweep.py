"""The cases of a sweep, from models, options and YAML files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damage import invoke
from tpkernels import dtypes
from tpkernels.bench.results import key
from tpkernels.bench.sweep import (
    LAYER,
    MODELS,
    PROJECTIONS,
    Settings,
    Sweep,
    plan_sweep,
    projection,
)
from tpkernels.cli import bench as command


def cases(**options: object) -> list[str]:
    sweep = plan_sweep(Settings(**options), ranks=None, device="cpu")  # type: ignore[arg-type]
    return [key(item) for item in sweep.items]


def test_the_products_of_a_model() -> None:
    """N and K before the split, of llama3-8b: 32 heads and 8 KV heads of 128."""
    projections = {name: projection(MODELS["llama3-8b"], name, 2) for name in PROJECTIONS}
    assert {name: (each.column, each.n, each.k) for name, each in projections.items()} == {
        "qkv": (True, 6144, 4096),
        "out": (False, 4096, 4096),
        "gate_up": (True, 28672, 4096),
        "down": (False, 4096, 14336),
        "lm_head": (True, 128256, 4096),
    }
    # 16 ranks hold a copy of one of 8 KV heads each.
    assert projection(MODELS["llama3-8b"], "qkv", 16).n == 4096 + 2 * 16 * 128
    assert projection(MODELS["qwen3-32b"], "out", 2).k == 64 * 128 != MODELS["qwen3-32b"].hidden
    assert projection(MODELS["gpt3-175b"], "gate_up", 2).n == 49152  # not gated


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_split(name: str) -> None:
    assert MODELS[name].heads % MODELS[name].kv_heads == 0
    world = 3 if name == "smollm2-135m" else 8
    for each in LAYER:
        matmul = projection(MODELS[name], each, world)
        assert (matmul.n if matmul.column else matmul.k) % world == 0


def test_a_sweep_is_a_product() -> None:
    names = cases(
        model=("llama3-8b",),
        m=("16,256",),
        tp=("2", "4"),
        dtype=("bf16,fp32",),
        projection=("out",),
    )
    assert names == [
        f"matmul_reduce_scatter {m}x4096x4096 {dtype} tp{world}"
        for world in (2, 4)
        for dtype in ("bfloat16", "float32")
        for m in (16, 256)
    ]


def test_models_that_share_a_product_share_the_case() -> None:
    given = Settings(model=("llama3-8b,llama2-7b",), m=("16",), projection=("out",))
    (item,) = plan_sweep(given, ranks=None, device="cpu").items
    assert item.labels == ("llama3-8b out", "llama2-7b out")


def test_ops_of_a_model() -> None:
    """Without sequence parallelism the row-parallel products end in an all-reduce."""
    names = cases(model=("llama3-8b",), m=("1",), op=("matmul_all_reduce",))
    assert [each.split()[:2] for each in names] == [
        ["matmul_all_reduce", "1x4096x4096"],
        ["matmul_all_reduce", "1x4096x14336"],
    ]
    assert len(cases()) == 7 * 2 + 5 * 3  # matmul ops by shapes, collectives by sizes
    assert cases(shape=("9,32,64",), op=("all_gather_matmul",), uneven=True)


def test_quick_and_what_overrides_it() -> None:
    def effort(**options: object) -> tuple[int, float | None]:
        effort = plan_sweep(Settings(**options), ranks=None, device="cpu").effort  # type: ignore[arg-type]
        return effort.repeat, effort.seconds

    assert effort() == (20, None)
    assert effort(quick=True) == (10, 2.0)
    assert effort(quick=True, repeat=3) == (3, 2.0)
    assert effort(quick=True, seconds=9.0, repeat=50) == (50, 9.0)


def sweep_of(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> Sweep:
    """What `tpkernels bench --config` would measure."""
    found: list[Sweep] = []
    monkeypatch.setattr(command, "run_sweep", lambda sweep, *_, **__: found.append(sweep))
    ended = invoke("bench", "--config", str(path), *options)
    assert ended.exit_code == 0, ended.output
    return found[0]


def test_a_yaml_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "op: [all_gather_matmul, all_reduce]\ntp: 2\nshape: [[16, 32, 64], '2,32,64']\n"
        "bytes: [4K, 1M]\ndtype: fp32\nseconds: 2\nquick: true\nwarm: true\n"
    )
    sweep = sweep_of(monkeypatch, path)
    assert [(item.spec.op, item.spec.shape) for item in sweep.items] == [
        ("all_gather_matmul", (16, 32, 64)),
        ("all_gather_matmul", (2, 32, 64)),
        ("all_reduce", (1024,)),
        ("all_reduce", (262144,)),
    ]
    assert {dtypes.name(item.spec.dtype) for item in sweep.items} == {"float32"}
    assert (sweep.effort.repeat, sweep.effort.seconds, sweep.effort.cold) == (10, 2.0, False)
    sweep = sweep_of(monkeypatch, path, "--dtype", "bf16", "--cold", "--op", "all_gather")
    assert {(item.spec.op, dtypes.name(item.spec.dtype)) for item in sweep.items} == {
        ("all_gather", "bfloat16")
    }
    assert sweep.effort.cold and sweep.effort.seconds == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shapes: [1]", "unknown key 'shapes'; choose from op, model, projection, m, shape,"),
        ("tp: {a: 1}", "tp: {'a': 1} is no value of it"),
        ("repeat: many", "Invalid value for '--repeat'"),
        ("repeat: true", "Invalid value for '--repeat'"),
        ("quick: maybe", "Invalid value for '--quick'"),
        ("seconds: [1, 2]", "seconds takes one value, not 2"),
        ("- op", "has no mapping"),
        ("op: [", "is not YAML"),
        ("op: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_what_a_yaml_file_cannot_say(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    ended = invoke("bench", "--config", str(path))
    assert ended.exit_code == 2 and message in ended.output
