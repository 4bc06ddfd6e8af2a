"""Models of features on the same road: traced, exported, verified, quantised."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import export_models
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import edgelin.runtimes
from edgelin import checkpoint
from edgelin.cli import main
from edgelin.export import golden, passes
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.export.verify import compare as verifying
from edgelin.export.verify.compare import verify
from edgelin.export.verify.report import Comparison, Quality, Verification
from edgelin.runtimes.distribution import deviation
from edgelin.runtimes.manifest import Manifest

VARIANTS = ("none", "int8", "int4")


@pytest.mark.parametrize("profile", ["fused", "plain"])
@pytest.mark.parametrize(
    ("size", "head"), [(1, "step"), (3, "sequence"), (5, "step"), (40, "sequence")]
)
def test_graphs_are_the_model(size: int, head: str, profile: str) -> None:
    """Sizes that equal the trace's example batch or time among them."""
    model = export_models.make_feature_model(("gdn", "ssm"), size=size, head=head)
    graph = trace(model)
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    runner, exact = export_models.session(graph), copy.deepcopy(model).double()
    specs = model.state_specs()
    assert [i.name for i in runner.get_inputs()] == ["features", *(s.input_name for s in specs)]
    assert [o.name for o in runner.get_outputs()] == ["outputs", *(s.output_name for s in specs)]
    assert runner.get_inputs()[0].shape == ["batch", "time", size]
    assert runner.get_outputs()[0].shape == ["batch", "kept", 3]
    random = np.random.default_rng(1)
    for batch, time in ((1, 1), (3, 63), (2, 64)):
        x = (10 * random.standard_normal((batch, time, size))).astype(np.float32)
        x[0, 0, 0], x[-1, -1, -1] = 1e30, -3e38  # of a broken sensor
        state = export_models.random_state(model, batch)
        with torch.no_grad():
            tensors = {k: torch.from_numpy(v) for k, v in state.items()}
            found, states = exact(torch.from_numpy(x).double(), tensors)
        wanted, after = found.numpy(), {name: value.numpy() for name, value in states.items()}
        feeds = {"features": x, **{s.input_name: state[s.name] for s in specs}}
        outputs, *present = runner.run(None, {**feeds, "num_logits_to_keep": np.array(0)})
        np.testing.assert_allclose(outputs, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        for spec, value in zip(specs, present, strict=True):
            scale = max(1.0, np.abs(after[spec.name]).max())
            np.testing.assert_allclose(value, after[spec.name], rtol=1e-4, atol=1e-4 * scale)
        last = runner.run(["outputs"], feeds)[0]
        np.testing.assert_allclose(last, outputs[:, -1:], rtol=1e-4, atol=1e-5)


def _exported(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint and its bundle with all variants."""
    checkpoint.save(folder / "model", export_models.make_feature_model(("gdn",), **options), None)
    export_checkpoint(folder / "model", folder / "bundle", quantise=VARIANTS)
    return folder / "model", folder / "bundle"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoint and bundle with a head for sequences; tests must not change them."""
    return _exported(tmp_path_factory.mktemp("classifier"), head="sequence")


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with numbers for every step."""
    return _exported(tmp_path_factory.mktemp("regression"), task="regression")


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_bundle_says_what_it_reads(classifier: tuple[Path, Path]) -> None:
    model, bundle = classifier
    content = json.loads((bundle / "edgelin.json").read_text())
    assert content["tokenizer"] is None
    assert content["input"]["feature_size"] == 5
    assert (content["output"]["head"], content["output"]["task"]) == ("sequence", "classification")
    assert [s["name"] for s in content["states"]][-2:] == ["pool", "position"]
    assert Manifest.read(bundle).states == checkpoint.load(model)[0].state_specs()
    assert sorted(p.name for p in bundle.iterdir()) == [
        "config.json", "edgelin.json", "golden.json", "onnx", "report.json", "report.md",
    ]  # fmt: skip


def test_the_golden_stream_looks_like_data(classifier: tuple[Path, Path]) -> None:
    folder, bundle = classifier
    model, _ = checkpoint.load(folder)
    pieces = json.loads((bundle / "golden.json").read_text())["pieces"]
    assert [len(piece["features"]) for piece in pieces] == [1, 1, 63, 64, 1]
    x = np.array([step for piece in pieces for step in piece["features"]])
    assert (x.astype(np.float32) == golden.inputs_of(model)).all()
    mean, scale = (model.get_buffer(f"embedding.{n}").numpy() for n in ("mean", "scale"))
    normal = (x - mean) * scale
    assert (x[:, -1].astype(np.float32) == mean[-1]).all()
    assert np.abs(normal[:, :-1].mean(0)).max() < 0.3
    assert np.abs(normal[:, :-1].std(0) - 1).max() < 0.3
    stream = edgelin.runtimes.load(bundle, variant="model", threads=1).stream()
    for piece in pieces:
        outputs = stream.feed(piece["features"])
        wanted = piece["top"]["logits"]
        np.testing.assert_allclose(outputs[piece["top"]["ids"]], wanted, rtol=1e-3, atol=1e-3)


def test_first_projection_and_head_stay_float(classifier: tuple[Path, Path]) -> None:
    _, bundle = classifier
    report = json.loads((bundle / "report.json").read_text())
    for name, width in (("model_q8", 8), ("model_q4", 4)):
        rounded = report["variants"][name]["matrices"]
        assert "blocks.0.mlp.down_proj.weight" in rounded
        assert not [key for key in rounded if key.startswith(("embedding", "head"))]
        recipe = Manifest.read(bundle).variants[name].quantisation
        assert recipe is not None and recipe["bits"] == width
        assert recipe["roles"]["embedding"] == recipe["roles"]["head"] == "float"


@pytest.mark.parametrize("kind", ["classifier", "regression"])
def test_all_forms_are_one_model(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model, bundle = request.getfixturevalue(kind)
    result = _run("verify", bundle, "--checkpoint", model, "--json", tmp_path / "parity.json")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "parity.json").read_text())
    tensors = {d["tensor"] for d in content["comparisons"][2]["differences"]}
    assert {"outputs", "recurrent.0", "conv.0"} <= tensors
    quality = content["qualities"][0]
    assert (quality["unit"], quality["positions"]) == ("step", 130)
    none = ("kl", "top1") if kind == "regression" else ("relative_error",)
    assert all(quality[key] is None for key in none)


def test_regression_is_compared_by_its_spread(regression: tuple[Path, Path]) -> None:
    _, bundle = regression
    (quality, _) = verify(bundle).qualities
    pieces = json.loads((bundle / "golden.json").read_text())["pieces"]
    x = [step for piece in pieces for step in piece["features"]]
    y, found = (
        edgelin.runtimes.load(bundle, variant=name).stream().feed(x, all_outputs=True)
        for name in ("model", "model_q8")
    )
    error = np.sqrt(np.mean((found - y) ** 2) / np.mean((y - y.mean(0)) ** 2))
    assert quality.relative_error == pytest.approx(error, rel=1e-4)
    assert deviation(y + 100, y + 100.5) == pytest.approx(0.5 / np.std(y - y.mean(0)), rel=1e-3)
    assert not Quality("q", "m", "step", 1, limit=0.05, relative_error=float("nan")).passed
    assert "relative error" in str(quality)


def test_quality_on_given_sequences(
    classifier: tuple[Path, Path], regression: tuple[Path, Path], tmp_path: Path
) -> None:
    """A head for sequences is compared after the last step of each."""
    x = (10 * np.random.default_rng(3).standard_normal((90, 5))).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, lengths=np.array([70, 1, 19]))
    for (_, bundle), positions in ((classifier, 3), (regression, 90)):
        path = tmp_path / "parity.json"
        result = _run("verify", bundle, "--features", tmp_path / "d.npz", "--json", path)
        assert result.exit_code == 0, result.output
        assert json.loads(path.read_text())["qualities"][0]["positions"] == positions


def test_data_of_the_other_kind_is_refused(
    classifier: tuple[Path, Path], tiny: Any, tmp_path: Path
) -> None:
    for arguments, message in (
        ((classifier[1], "--text", __file__), "reads features, not text; give --features in"),
        ((tiny.path, "--features", tmp_path / "d.npz"), "reads text, not features"),
    ):
        result = _run("verify", *arguments)
        assert result.exit_code == 1 and message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def chunks_of(result: Verification) -> Comparison:
    """Chunks of the float graph beside the recurrence."""
    found = (c for c in result.comparisons if (c.variant, c.form) == ("model", "chunks"))
    return next(found)


@pytest.mark.parametrize("state", ["pool", "recurrent.0"])
def test_a_graph_that_forgets_fails(
    state: str, classifier: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that keeps its layers right and loses the mean under the head."""
    form = verifying.OnnxForm.__call__

    def forgets(self: Any, steps: Any, states: Any) -> Any:
        sequences, states = form(self, steps, states)
        states[state] = np.roll(states[state], 1, axis=-1)
        return sequences, states

    monkeypatch.setattr(verifying.OnnxForm, "__call__", forgets)
    model, bundle = classifier
    comparison = chunks_of(verify(bundle, model))
    (outputs,) = (d for d in comparison.differences if d.tensor == "outputs" and d.length == 130)
    first, later = ([outputs.errors[t] for t in part] for part in (range(64), range(64, 130)))
    assert max(first) < 1e-4 < max(later)


def test_the_outputs_hang_on_the_stream(
    classifier: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over a million steps would hide what the layers do."""
    form = verifying.OnnxForm.__call__

    def deaf(self: Any, steps: Any, states: Any) -> Any:
        return form(self, steps[:, ::-1].copy(), states)

    monkeypatch.setattr(verifying.OnnxForm, "__call__", deaf)
    model, bundle = classifier
    comparison = chunks_of(verify(bundle, model))
    (outputs,) = (d for d in comparison.differences if d.tensor == "outputs" and d.length == 63)
    assert outputs.errors[0] > 1e-3


def test_eval_of_checkpoint_and_bundle_agree(
    classifier: tuple[Path, Path], regression: tuple[Path, Path], tmp_path: Path
) -> None:
    random = np.random.default_rng(4)
    x = (10 * random.standard_normal((400, 5))).astype(np.float32)
    lengths = np.array([100, 1, 199, 100])
    answers = {
        "accuracy": random.integers(0, 3, 4),
        "mean_squared_error": random.standard_normal((400, 3)).astype(np.float32),
    }
    for key, folders in (("accuracy", classifier), ("mean_squared_error", regression)):
        np.savez(tmp_path / "d.npz", x=x, lengths=lengths, y=answers[key])
        found = []
        for folder, variant in ((folders[0], []), (folders[1], ["--variant", "model"])):
            arguments = [folder, "--features", tmp_path / "d.npz", "--json", *variant]
            result = _run("eval", *arguments)
            assert result.exit_code == 0, result.output
            found.append(json.loads(result.stdout))
        assert found[0] == pytest.approx(found[1], rel=1e-5)
        assert found[0]["answers"] == len(answers[key]) and key in found[0]
    refused = _run("eval", classifier[0], "--text", __file__)
    assert refused.exit_code == 1 and "reads features, not text" in refused.stderr
