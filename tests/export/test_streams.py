"""Bundles exported with ``streams``: rows of different lengths in one call, in every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import MIXERS, VOCAB, make_feature_model, make_model, session
from torch import nn

import edgelin.runtimes
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.export.verify.compare import verify
from edgelin.model import SequenceModel
from edgelin.recurrences import linear as recurrence

LAYERS = tuple(name for name in MIXERS if name != "full")


@pytest.fixture(scope="module")
def model() -> SequenceModel:
    return make_model(LAYERS)


@pytest.fixture(scope="module")
def traced(model: SequenceModel) -> ir.Model:
    return trace(model, lengths=True)


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with every variant; tests only read it."""
    out = tmp_path_factory.mktemp("streams") / "out"
    report = export_checkpoint(small_checkpoint, out, quantise=("none", "int8"), streams=True)
    errors = {name: variant.ragged for name, variant in report.variants.items()}
    assert errors.keys() == {"model", "model_q8"}
    assert errors["model"] is not None and errors["model"] < 1e-5
    assert "Rows of different lengths in one call of model_q8" in report.text()
    return out


def _states(model: SequenceModel, batch: int) -> dict[str, np.ndarray[Any, Any]]:
    """By input name, deep in a stream."""
    random = np.random.default_rng(1)
    states = {}
    for spec in model.state_specs():
        values = random.standard_normal((batch, *spec.sized())).astype(np.float32)
        if spec.kind == "normalizer":
            values = 1 + np.abs(values)
        states[spec.input_name] = np.arange(batch) * 70 if spec.dtype == "int64" else values
    return states


@pytest.mark.parametrize("profile", list(PROFILES))
def test_rows_of_a_graph_equal_the_float64_model_of_each_alone(
    profile: str, model: SequenceModel, traced: ir.Model
) -> None:
    graph = traced.clone()
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    runner, exact = session(graph), make_model(LAYERS).double()
    for lengths in ([0, 1, 40, 64], [1, 0, 1, 1]):
        time, batch = max(lengths), len(lengths)
        ids = np.random.default_rng(2).integers(0, VOCAB, (batch, time))
        states = _states(model, batch)
        feeds = {"input_ids": ids, **states, "lengths": np.array(lengths)}
        every, *after = runner.run(None, {**feeds, "num_logits_to_keep": np.array(0)})
        for row, length in enumerate(lengths):
            at, names = slice(row, row + 1), [spec.name for spec in model.state_specs()]
            if length == 0:
                for before, array in zip(states.values(), after, strict=True):
                    assert before[at].tobytes() == array[at].tobytes()
                continue
            own = {n: torch.from_numpy(s[at]) for n, s in zip(names, states.values(), strict=True)}
            own = {n: t.double() if t.is_floating_point() else t for n, t in own.items()}
            with torch.no_grad():
                wanted, wanted_after = exact(torch.from_numpy(ids[at, :length]), own)
            _close(every[at, :length], wanted.numpy())
            for name, array in zip(names, after, strict=True):
                _close(array[at], wanted_after[name].numpy())
            for keep in (1, 3, 99):
                logits = runner.run(["logits"], {**feeds, "num_logits_to_keep": np.array(keep)})[0]
                assert logits.shape == (batch, min(keep, time), VOCAB)
                count = min(keep, length)
                np.testing.assert_array_equal(
                    logits[row, -count:], every[row, length - count : length]
                )
    full = {"input_ids": ids, **states}
    assert runner.run(None, full)[0].tobytes() == (
        runner.run(None, {**full, "lengths": np.full(batch, time + 9)})[0].tobytes()
    )


def _close(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5 * max(np.abs(wanted).max(), 1e-9))


def test_features_behind_an_end_may_be_anything() -> None:
    """Also not finite, and in the mean that a head for whole sequences reads."""
    model = make_feature_model(("gdn",), head="sequence")
    graph = trace(model, lengths=True)
    passes.lower(graph, PROFILES["fused"])
    passes.finish(graph, PROFILES["fused"])
    runner, exact = session(graph), make_feature_model(("gdn",), head="sequence").double()
    specs, lengths = model.state_specs(), [0, 1, 30, 64]
    x = np.random.default_rng(3).standard_normal((4, 64, 5)).astype(np.float32)
    states = _states(model, 4)
    own = [torch.from_numpy(array) for array in states.values()]
    own = [t.double() if t.is_floating_point() else t for t in own]
    named = {spec.name: t for spec, t in zip(specs, own, strict=True)}
    with torch.no_grad():
        ragged = exact(torch.from_numpy(x).double(), named, torch.tensor(lengths))[1]
    for row, length in enumerate(lengths):
        x[row, length:] = np.nan
    outputs, *after = runner.run(None, {"features": x, **states, "lengths": np.array(lengths)})
    assert [array[0].tobytes() for array in after] == [a[0].tobytes() for a in states.values()]
    for row, length in list(enumerate(lengths))[1:]:
        at = slice(row, row + 1)
        alone = {name: tensor[at] for name, tensor in named.items()}
        with torch.no_grad():
            wanted, wanted_after = exact(torch.from_numpy(x[at, :length]).double(), alone)
        _close(outputs[at], wanted[:, -1:].numpy())
        for spec, array in zip(specs, after, strict=True):
            _close(array[at], wanted_after[spec.name].numpy())
            torch.testing.assert_close(ragged[spec.name][at], wanted_after[spec.name])


def test_verify_compares_ragged_rows(bundle: Path, small_checkpoint: Path) -> None:
    found = verify(bundle, small_checkpoint)
    forms = {c.variant: c for c in found.comparisons if c.form == "rows of a ragged call"}
    assert forms.keys() == {"model", "model_q8"} and all(c.passed for c in forms.values())
    assert found.passed


def test_a_pool_reads_ragged_prompts_in_one_call(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = edgelin.runtimes.load(bundle, variant="model", threads=1)
    assert opened.manifest.lengths == "lengths"
    pool, random = opened.pool(6), np.random.default_rng(5)
    run, calls = pool._buffers.run, []
    monkeypatch.setattr(
        pool._buffers, "run", lambda x, **options: calls.append(x.shape) or run(x, **options)
    )
    slots = [pool.add() for _ in range(6)]
    read: dict[int, list[int]] = {slot: [] for slot in slots}
    for counts in ([50, 51, 48, 53, 1, 1], [1, 1, 1, 1, 1, 1], [100, 97, 3, 0, 0, 1]):
        given = {
            slot: [int(i) for i in random.integers(0, VOCAB, count)]
            for slot, count in zip(slots, counts, strict=True)
            if count
        }
        found = pool.feed(given)
        for slot, ids in given.items():
            read[slot] += ids
            alone = opened.stream()
            np.testing.assert_allclose(found[slot], alone.feed(read[slot]), atol=1e-4)
            states = pool.snapshot(slot).tensors
            for name, array in alone.states().items():
                np.testing.assert_allclose(states[name], array, atol=1e-4)
    assert calls == [
        (6, 1), (4, 52),
        (6, 1),
        (4, 3), (2, 64), (2, 33),
    ]  # fmt: skip


def test_a_graph_that_lets_padding_into_its_states_is_not_put_in_place(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "masked", lambda x, lengths: x)
    with pytest.raises(EdgelinError, match="model: rows of a ragged call are off by"):
        export_checkpoint(small_checkpoint, tmp_path / "out", streams=True)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.failed").is_dir()


def test_what_cannot_take_lengths_is_refused() -> None:
    with pytest.raises(EdgelinError, match=r"layer 0: .*grows; export with --attention window=N"):
        trace(make_model(("full",)), lengths=True)

    class Mixer(nn.Module):
        """One that was written before there were lengths."""

        def forward(self, x: Any, state: Any, position: Any) -> Any:
            return x, state

        def state_specs(self) -> list[Any]:
            return []

    model = make_model(("linear", "gdn"))
    model.blocks[1].mixer = Mixer()
    with pytest.raises(EdgelinError, match=r"layer 1: .*Mixer takes no lengths, which --streams"):
        trace(model, lengths=True)
