"""Rounding that a text decides, beside loops and hooks of float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import export_models
import numpy as np
import pytest
import torch
from torch import nn

from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.calibrate import calibrate
from edgelin.export.quantise.gptq import _DAMPING, MOST_CODES, gptq
from edgelin.export.quantise.nodes import matrices, quantise, round_to_nearest
from edgelin.export.quantise.recipe import RECIPES, Format
from edgelin.export.quantise.rollout import CALL, Rollout
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

WIDTH = 70  # the last block of 32 is not full


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _data(tokens: int = 200) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A matrix, and what it reads: a few directions are loud, one column is silent."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((5, WIDTH)).astype(np.float32)
    mixed = random.standard_normal((tokens, WIDTH)) @ random.standard_normal((WIDTH, WIDTH))
    x = mixed + 20 * random.standard_normal((tokens, 3)) @ random.standard_normal((3, WIDTH))
    x[:, 11] = 0
    return rows, x


def _one_by_one(
    rows: np.ndarray[Any, Any], hessian: np.ndarray[Any, Any], nearest: Any
) -> np.ndarray[Any, Any]:
    """Optimal brain quantisation in a fixed order, with the inverse made anew for every column."""
    levels = (1 << nearest.bits) - 1
    codes = np.zeros(rows.shape, int)
    damped = hessian + _DAMPING * hessian.diagonal().mean() * np.eye(len(hessian))
    order = np.argsort(-hessian.diagonal(), kind="stable")
    for n, row in enumerate(rows.astype(np.float64)):
        w, left = row.copy(), list(order)
        for j in order:
            block = j // nearest.block_size
            scale = float(nearest.scales[n, block])
            zeros = nearest.zero_points
            zero = 1 << (nearest.bits - 1) if zeros is None else int(zeros[n, block])
            first = min(max(round(row[j] / scale + zero), 0), levels)
            code = min(max(round(w[j] / scale + zero), 0, first - 1), levels, first + 1)
            codes[n, j] = code
            inverse = np.linalg.inv(damped[np.ix_(left, left)])
            error = w[j] - scale * (code - zero)
            w[left] -= error / inverse[0, 0] * inverse[0]
            left.remove(j)
    return codes


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_is_its_equation(bits: int) -> None:
    rows, x = _data()
    hessian, chosen = x.T @ x, Format(bits, 32)
    nearest = round_to_nearest(rows, chosen)
    wanted = _one_by_one(rows, hessian, nearest)
    before = nearest.values(WIDTH) - rows
    start = nearest.codes.copy().astype(int)
    found = gptq(rows, torch.from_numpy(hessian), nearest)
    codes = found.codes.reshape(len(rows), -1)[:, :WIDTH]
    assert (codes == wanted).mean() > 0.99  # float32 may decide a tie otherwise
    assert np.abs(found.codes.astype(int) - start).max() <= MOST_CODES
    after = found.values(WIDTH) - rows
    assert np.linalg.norm(after @ x.T) < 0.7 * np.linalg.norm(before @ x.T)


def test_what_nothing_was_multiplied_with_keeps_the_nearest_codes() -> None:
    rows, _ = _data()
    nearest = round_to_nearest(rows, Format(4, 32))
    error = np.linalg.norm(nearest.values(WIDTH) - rows)
    found = gptq(rows, torch.zeros(WIDTH, WIDTH, dtype=torch.float64), nearest)
    assert np.linalg.norm(found.values(WIDTH) - rows) <= error * (1 + 1e-5)


def _model() -> SequenceModel:
    return export_models.make_model(("gdn", "attention", "linear"), seed=3)


def _ids(count: int = CALL + 45) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, export_models.VOCAB, count)


def test_a_reading_is_the_model_with_its_state_carried() -> None:
    model, ids = _model(), _ids()
    reading = Rollout(model, ids)
    reading.start()
    for _ in model.blocks:
        reading.read()
    state, wanted = model.initial_state(1), []
    with torch.no_grad():
        for token in ids:
            logits, state = model(torch.tensor([[token]]), state)
            wanted.append(logits[0])
    got = reading.logits(slice(None))
    torch.testing.assert_close(got, torch.cat(wanted), atol=1e-4, rtol=1e-4)


def test_hessians_are_of_all_that_a_stream_reads() -> None:
    model, ids = _model(), _ids()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):

            def note(_: Any, given: Any, name: str = name) -> None:
                seen.setdefault(f"{name}.weight", []).append(given[0].flatten(0, 1).double())

            part.register_forward_pre_hook(note)
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    wanted = {name: torch.cat(parts) for name, parts in seen.items()}
    reading = Rollout(model, ids)
    reading.start()
    found: dict[str, torch.Tensor] = {}
    for _ in model.blocks:
        found |= reading.watch()
        reading.read()
    assert sorted(found) == sorted(wanted)
    for name, x in wanted.items():
        scale = float(found[name].abs().max())
        torch.testing.assert_close(found[name] / scale, x.T @ x / scale, atol=1e-5, rtol=0)


def test_calibration_leaves_the_model_and_lowers_its_error() -> None:
    model, ids = _model(), _ids(1000)
    before = {name: p.clone() for name, p in model.named_parameters()}
    recipe = RECIPES["int4-fast"]
    assert recipe is not None
    graph = trace(model)
    passes.lower(graph, PROFILES["fused"])
    found = matrices(graph)
    formats = {n: f for own in found if (f := own.format(recipe)) for n in own.names}
    done: list[int] = []
    rounded = calibrate(model, formats, ids, progress=done.append)
    assert sum(done) == sum(model.get_parameter(name).numel() for name in formats)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    nearest = {
        name: round_to_nearest(model.get_parameter(name).detach().numpy(), chosen)
        for name, chosen in formats.items()
    }
    reading, ratios = Rollout(model, ids), []
    reading.start(rounded)
    for name, hessian in reading.watch().items():
        if name in formats:
            weight = model.get_parameter(name).detach().numpy()
            errors = [
                torch.from_numpy(kept[name].values(weight.shape[1]) - weight).double()
                for kept in (rounded, nearest)
            ]
            loss = [float((error @ hessian * error).sum()) for error in errors]
            ratios.append(loss[0] / loss[1])
    assert max(ratios) < 1 and min(ratios) < 0.95  # random weights read almost white noise
    outcome = quantise(graph, recipe, rounded=rounded)
    assert all(outcome.rounded[name] is own for name, own in rounded.items())
