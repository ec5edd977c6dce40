"""How a report reads, and its picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ranked
from tests.support.reference import Expected
from tpkernels.numerics import compare


def test_percentages_do_not_round_to_all_or_nothing() -> None:
    x = torch.zeros(100_000)
    one, all_but_one = x.clone(), torch.ones_like(x)
    one[7], all_but_one[7] = 1, 0
    assert "1 of 100000 elements (0.1%)" in str(compare(x, one, 0, 0))
    assert "99999 of 100000 elements (99.9%)" in str(compare(x, all_but_one, 0, 0))


def test_the_heatmap_shows_the_wrong_region(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'tpkernels[plots]'")
    from matplotlib.image import imread

    x = torch.zeros(64, 64)
    wrong = x.clone()
    wrong[16:32, 32:] = 1.0
    wrong[0, 0] = math.nan  # must not take the colours from the others
    pictures = {}
    for name, out in {"right": x, "wrong": wrong}.items():
        compare(x, out, 0.0, 0.0, ([16, 16, 0, 32], 2)).save_heatmap(tmp_path / f"{name}.png")
        pictures[name] = torch.from_numpy(imread(tmp_path / f"{name}.png").copy())
    brightest, largest = {}, {}
    for name, picture in pictures.items():
        assert min(picture.shape[:2]) > 200
        assert len(picture.flatten(0, 1).unique(dim=0)) > 50
        red, green, blue = picture[..., :3].unbind(-1)
        bright = (red > 0.95) & (green > 0.95) & (blue < 0.75)  # the end of the scale
        brightest[name], largest[name] = bright.tensor_split(2, dim=1)
    assert brightest["right"].double().mean() < 0.01
    assert brightest["wrong"].double().mean() > 0.03
    row, column = brightest["wrong"].nonzero().double().median(0).values.tolist()
    height, width = brightest["wrong"].shape
    assert 0.25 < row / height < 0.5 < column / width < 0.85  # second of four, second of two
    assert largest["wrong"].sum() > 1.5 * brightest["wrong"].sum()  # the NaN's region as well


def test_the_heatmap_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = compare(torch.ones(2), torch.ones(2), 0, 0)
    with pytest.raises(ImportError, match=r"pip install 'tpkernels\[plots\]'"):
        report.save_heatmap(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_an_op_is_told_by_region() -> None:
    exact, bound = torch.zeros(4, 4, dtype=torch.float64), torch.full((4, 4), 0.5)
    want = Expected(exact, bound, torch.float32)
    got = torch.full((4, 4), 0.5)
    assert ranked.difference(got, want) is None
    for wrong in (0.75, math.nan):
        got[2, 1] = wrong
        text = ranked.difference(got, want)
        assert text is not None
        assert f"worst: [2, 1] is {wrong}, expected 0" in text
        assert text.count("!") == 1
