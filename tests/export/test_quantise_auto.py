"""Choosing bits within a budget: beside all combinations, on stand-ins and in whole exports."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import export_models
import numpy as np
import onnx
import pytest

from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.auto import choose, path
from edgelin.export.quantise.loss import Budget, Loss
from edgelin.export.quantise.nodes import matrices, quantise
from edgelin.export.quantise.plan import Calibration
from edgelin.export.quantise.recipe import RECIPES, Format, Recipe
from edgelin.export.quantise.sensitivity import Option, size
from edgelin.export.quantise.speed import Timer
from edgelin.export.trace import trace
from edgelin.export.verify.compare import verify
from edgelin.runtimes.manifest import Manifest

FORMATS = (Format(4, 64), Format(4, 32), Format(8, 32), None)


def _options(seed: int, count: int = 4) -> dict[str, list[Option]]:
    """Costs and losses of a few matrices; one option costs more and loses more than another."""
    random = np.random.default_rng(seed)
    found = {}
    for i in range(count):
        costs = random.permutation(np.arange(1, 100))[:4]
        losses = [*np.sort(random.random(3))[::-1], 0.0]
        if i == 0:
            losses[1] = losses[0] + 0.1
        found[f"m{i}"] = [
            Option(f, int(c), float(x))
            for f, c, x in zip(FORMATS, np.sort(costs), losses, strict=True)
        ]
    return found


def _bytes(name: str, option: Option) -> float:
    return option.bytes


@pytest.mark.parametrize("seed", range(4))
def test_no_model_is_cheaper_and_better_than_one_on_the_path(seed: int) -> None:
    options = _options(seed)
    points = path(options, _bytes)
    every = [
        (sum(o.bytes for o in combination), sum(o.loss for o in combination))
        for combination in itertools.product(*options.values())
    ]
    assert points[0].cost == min(cost for cost, _ in every)
    assert points[-1].loss == 0 and points[-1].cost == max(c for c, x in every if x == 0)
    for point in points:
        own = {
            name: next(o for o in options[name] if o.format == f)
            for name, f in point.formats.items()
        }
        assert point.cost == pytest.approx(sum(o.bytes for o in own.values()))
        assert point.loss == pytest.approx(sum(o.loss for o in own.values()), abs=1e-12)
        assert not any(c <= point.cost and x < point.loss - 1e-9 for c, x in every)
    assert [p.cost for p in points] == sorted(p.cost for p in points)


def _attempt(factor: float) -> Callable[[Recipe], tuple[Loss, Mapping[str, Any]]]:
    """A model whose losses are so many times what was foreseen."""
    options = _options(1, 8)

    def attempt(recipe: Recipe) -> tuple[Loss, Mapping[str, Any]]:
        kl = factor * sum(
            next(o.loss for o in options[name] if o.format == f)
            for name, f in recipe.matrices.items()
        )
        return Loss(1, 1.0, 1.0 + kl, kl, 1.0), {"tried": recipe}

    return attempt


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_a_wrong_forecast_is_put_right(factor: float) -> None:
    points, recipe = path(_options(1, 8), _bytes), RECIPES["auto"]
    assert recipe is not None
    found = choose(points, recipe, Budget(kl=1.0), 1.0, _attempt(factor))
    assert found.loss.kl <= 1
    assert found.rounded["tried"] is found.recipe and found.recipe.matrices == found.point.formats
    best = min(p.cost for p in points if factor * p.loss <= 1)
    assert found.point.cost <= 1.25 * best


def test_a_budget_that_nothing_meets_gives_the_nearest_model() -> None:
    points, recipe = path(_options(1, 8), _bytes), RECIPES["auto"]
    assert recipe is not None

    def attempt(tried: Recipe) -> tuple[Loss, Mapping[str, Any]]:
        loss, rounded = _attempt(1.0)(tried)
        return Loss(1, 1.0, 2.0 + loss.kl, 1.0 + loss.kl, 1.0), rounded

    found = choose(points, recipe, Budget(relative=0.5), 1.0, attempt)
    assert Budget(relative=0.5).missed(found.loss)
    assert found.loss.kl < 1.6


def test_budgets_say_what_was_missed() -> None:
    loss = Loss(10, 1.0, 1.03, 0.02, 0.9)
    assert Budget(relative=0.031, kl=0.021).missed(loss) == []
    assert Budget(relative=0.02, kl=0.01).missed(loss) == [
        "bits per byte grow by 3.00 %, the budget is 2 %",
        "KL is 0.02 nat, the budget is 0.01",
    ]
    assert Budget(kl=1.0).missed(Loss(10, 1.0, 1.0, float("nan"), 1.0))
    assert Budget(top1=0.91).missed(loss) == [
        "90.0 % of the first choices are the same, the budget asks for 91 %"
    ]
    assert Budget(relative=0.031, top1=0.9).missed(loss) == []
    assert Budget(relative=0.02, kl=0.05).nats(2.0) == 0.04
    assert Budget(relative=0.02, top1=0.92).nats(2.0) < 0.02


def test_auto_guards_first_choices_unless_the_budget_is_in_nat() -> None:
    limits = {
        (): Budget(relative=0.02, top1=0.93),
        (("budget", 0.1),): Budget(relative=0.1, top1=0.93),
        (("budget_kl", 0.1),): Budget(kl=0.1),
        (("budget_kl", 0.1), ("budget_top1", 0.8)): Budget(kl=0.1, top1=0.8),
        (("budget_top1", 0.0),): Budget(relative=0.02, top1=0.0),
    }
    for given, wanted in limits.items():
        assert Calibration("text", **dict(given)).limits(auto=True) == wanted
    assert Calibration("text").limits(auto=False) is None
    assert Calibration("text", budget=0.1).limits(auto=False) == Budget(relative=0.1)
    assert Calibration("text", budget_top1=0.9).limits(auto=False) == Budget(top1=0.9)


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_first_choices_are_kept(factor: float) -> None:
    """That many change with the root of the KL; bits per byte stay as they are."""
    points, recipe = path(_options(1, 8), _bytes), RECIPES["auto"]
    assert recipe is not None
    right = _attempt(factor)

    def attempt(tried: Recipe) -> tuple[Loss, Mapping[str, Any]]:
        loss, rounded = right(tried)
        return Loss(1, 1.0, 1.0, loss.kl, 1 - (0.42 * loss.kl) ** 0.5), rounded

    found = choose(points, recipe, Budget(relative=0.5, top1=0.352), 1.0, attempt)
    assert found.loss.top1 >= 0.352
    best = min(p.cost for p in points if factor * p.loss <= 0.99)
    assert found.point.cost <= 1.25 * best


def test_sizes_are_those_of_the_file() -> None:
    graph = trace(export_models.make_model(("gdn",), tied=False))
    passes.lower(graph, PROFILES["fused"])
    for name in ("int8", "int4"):
        own, recipe = graph.clone(), RECIPES[name]
        assert recipe is not None
        foreseen = sum(size(m, f) for m in matrices(own) if (f := m.format(recipe)) is not None)
        names = quantise(own, recipe).rounded
        stored = sum(
            value.const_value.nbytes
            for key, value in own.graph.initializers.items()
            if value.const_value is not None and any(key.startswith(f"{n}_") for n in names)
        )
        assert foreseen == pytest.approx(stored, rel=0.02)  # odd numbers of zero points


def test_times_are_of_products_alone() -> None:
    graph = trace(export_models.make_model(("linear",), tied=False))
    passes.lower(graph, PROFILES["fused"])
    timer, found = Timer(), {own.name: own for own in matrices(graph)}
    assert timer.milliseconds(found["embedding.weight"], Format(4, 32)) == 0
    for chosen in (Format(4, 32), Format(8, 32), None):
        assert timer.milliseconds(found["head.weight"], chosen) > 0


@pytest.fixture(scope="module")
def text() -> str:
    random = np.random.default_rng(2)
    return " ".join(random.choice(["a", "small", "text", "of", "few", "words", "more"], 900))


@pytest.mark.parametrize("minimise", ["size", "time"])
def test_auto_exports_what_it_chose(
    small_checkpoint: Path, tmp_path: Path, text: str, minimise: str
) -> None:
    out = tmp_path / "out"
    calibration = Calibration(text, budget_kl=2e-6, minimise=minimise)
    report = export_checkpoint(
        small_checkpoint, out, quantise=("auto",), calibration=calibration, roles=("mlp=int8",)
    )
    manifest = Manifest.read(out)
    recipe = manifest.variants["model_auto"].quantisation
    assert recipe is not None and recipe["method"] == "gptq"
    assert recipe["roles"]["mixer"] == "auto" and recipe["roles"]["gates"] == "float"
    graph = onnx.load(str(out / manifest.variants["model_auto"].file), load_external_data=False)
    found = {}
    for node in graph.graph.node:
        values = {a.name: a.i for a in node.attribute}
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            codes = node.input[0 if node.op_type.startswith("Gather") else 1]
            stem = codes.rpartition("_q")[0]
            found[stem] = f"int{values['bits']}/{values['block_size']}"
    chosen = {name: f for name, f in recipe["matrices"].items() if f != "float"}
    assert chosen.items() <= found.items() and "blocks.0.mlp.down_proj.weight" not in chosen
    assert found["blocks.0.mlp.down_proj.weight"].startswith("int8/")
    (variant,) = report.variants.values()
    assert variant.loss is not None and 0 < variant.loss.kl <= 2e-6
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert "tradeoff.png" in manifest.files
    saved = json.loads((out / "report.json").read_text())["variants"]["model_auto"]
    assert saved["trade_off"]["unit"] == ("MB" if minimise == "size" else "ms")
    assert saved["loss"]["kl"] == variant.loss.kl
    if minimise == "size":
        assert verify(out, small_checkpoint).passed


def test_a_missed_budget_keeps_the_bundle_aside(
    small_checkpoint: Path, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "out"
    calibration = Calibration(text, method="nearest", budget_kl=1e-9)
    with pytest.raises(EdgelinError, match=r"model_q4: KL is .* nat, the budget is 1e-09; see"):
        export_checkpoint(small_checkpoint, out, quantise=("int4",), calibration=calibration)
    assert not out.exists()
    assert "bits per byte" in (tmp_path / "out.failed" / "report.md").read_text()
