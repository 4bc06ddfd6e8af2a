"""``edgelin verify``: what it accepts, what it must not accept, and how it says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from edgelin import checkpoint as checkpoints
from edgelin import tokenizer
from edgelin.cli import main
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.export.verify import compare as verifying
from edgelin.export.verify import golden as verify_golden
from edgelin.export.verify import torch_forms as verify_torch
from edgelin.export.verify.compare import LENGTHS, verify
from edgelin.export.verify.forms import relative_error, replay
from edgelin.export.verify.report import TRUTH
from edgelin.model import SequenceModel
from edgelin.runtimes import load
from edgelin.runtimes import manifest as manifests
from edgelin.runtimes.distribution import divergence

MIXERS: dict[str, dict[str, Any]] = {
    "gdn": {"type": "gated_deltanet", "num_heads": 2, "key_dim": 16, "value_dim": 24},
    "local": {"type": "attention", "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "window": 64},
    "linear": {"type": "linear_attention", "num_heads": 1, "key_dim": 16, "value_dim": 24},
}

RWKV = {"type": "rwkv7", "num_heads": 2, "key_dim": 1, "value_dim": 8, "decay_rank": 2}


def _checkpoint(
    folder: Path, seed: int, *, layers: tuple[str, ...] = tuple(MIXERS), times: float = 5
) -> Path:
    """Weights are multiplied: initial ones hardly move the stream, which would hide errors."""
    torch.manual_seed(seed)
    text = tokenizer.train(["a model is one model in all its forms. " * 20], 300)
    config = ModelConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        layers=layers,
        mixers={name: {**MIXERS, "rwkv": RWKV}[name] for name in layers},
    )
    model = SequenceModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(times)
    checkpoints.save(folder, model, text.to_str())
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory.mktemp("verify") / "checkpoint", seed=0)


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    out = checkpoint.with_name("bundle")
    export_checkpoint(checkpoint, out, quantise=("none", "int8", "int4"))
    return out


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def test_all_forms_are_one_model(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    result = _run(bundle, "--checkpoint", checkpoint, "--json", tmp_path / "parity.json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    header = "tensor parallel (chunked) parallel (chunked), ragged"
    header += " model steps model chunks model random calls"
    for name in ("model_q8", "model_q4"):
        forms = [f"{name} {form}" for form in ("steps", "chunks")]
        both = [*(f"{form} (float activations)" for form in forms), *forms]
        header += " ".join(["", *both, f"{name} random calls"])
    assert lines[0].split() == header.split()
    tensors = [line.split()[0] for line in lines[1:]]
    assert tensors[:3] == ["conv.0", "hidden.0", "recurrent.0"]
    assert {"key.1", "value.1", "normalizer.2", "hidden.2", "logits", "position"} <= set(tensors)
    assert lines[-1] == f"{bundle} is verified"

    content = json.loads((tmp_path / "parity.json").read_text())
    assert content["passed"] is True
    forms = [(c["variant"], c["form"], c["against"]) for c in content["comparisons"]]
    assert forms == [
        (None, "parallel (chunked)", "recurrence in float64"),
        (None, "parallel (chunked), ragged", "recurrence in float64"),
        ("model", "steps", "recurrence in float64"),
        ("model", "chunks", "recurrence in float64"),
        ("model", "random calls", "recurrence in float64"),
        *(
            (name, form, against)
            for name in ("model_q8", "model_q4")
            for form, against in (
                ("steps (float activations)", "recurrence in float64"),
                ("chunks (float activations)", "recurrence in float64"),
                ("steps", "recurrence in float64"),
                ("chunks", "recurrence in float64"),
                ("random calls", "recurrence in float64"),
                ("chunks", "its steps"),
            )
        ),
    ]
    ragged = content["comparisons"][1]["differences"]
    ends = {(d["length"], *d["errors"]) for d in ragged if d["tensor"] == "recurrent.0"}
    assert ends == {(1, "0"), (65, "64"), (130, "129")}
    chunks = content["comparisons"][3]["differences"]
    assert {d["length"] for d in chunks} == set(LENGTHS)
    logits = next(d for d in chunks if d["tensor"] == "logits" and d["length"] == 130)
    assert len(logits["errors"]) == 130
    state = next(d for d in chunks if d["tensor"] == "recurrent.0" and d["length"] == 130)
    assert list(state["errors"]) == ["63", "127", "129"]
    assert [q["variant"] for q in content["qualities"]] == ["model_q8", "model_q4"]
    for probe in content["probes"]:
        assert probe["passed"] and min(probe["read"].values()) > 1e-4
        assert set(probe["read"]) == {*probe["written"], "position"}


def test_without_checkpoint(bundle: Path) -> None:
    """Needs no torch, and says what it did not do."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnx_ir']));"
        "from edgelin.cli import main; main(['verify', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bundle)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model chunks beside its steps" in done.stdout
    assert "model random calls beside its steps" in done.stdout
    assert "model: every state moves the answers" in done.stdout
    assert "not compared with the model in torch; give --checkpoint" in done.stdout


def test_quality_on_a_given_text(bundle: Path, tmp_path: Path) -> None:
    """The divergence of two passes over the text, computed here from the runtime's logits."""
    text = "all forms of a model are one model. " * 20
    (tmp_path / "text.txt").write_text(text)
    path = tmp_path / "parity.json"
    assert _run(bundle, "--text", tmp_path / "text.txt", "--json", path).exit_code == 0
    logits = []
    for variant in ("model", "model_q8"):
        opened = load(bundle, variant=variant)
        logits.append(opened.stream().feed(opened.text.encode(text), all_logits=True))
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in logits)
    expected = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    quality = json.loads(path.read_text())["qualities"][0]
    assert quality["positions"] == len(p)
    assert quality["kl"] == pytest.approx(expected.item(), rel=1e-6)
    assert quality["top1"] == (p.argmax(-1) == q.argmax(-1)).double().mean().item()


def test_beyond_tolerance_exits_with_one(bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    result = _run(bundle, "--checkpoint", checkpoint, "--tolerance", "1e-12", "--json", path)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: parallel (chunked) beside recurrence")
    assert "BEYOND the allowed 1e-12" in result.stdout
    assert json.loads(path.read_text())["passed"] is False


def test_truth_is_the_reference(
    bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another reference, every float form must fail, in that layer and not before it."""
    right = verify_torch._REFERENCES["edgelin::linear"]

    def wrong(*args: Any) -> Any:
        o, state = right(*args)
        return o, 1.01 * state

    monkeypatch.setitem(verify_torch._REFERENCES, "edgelin::linear", wrong)
    result = verify(bundle, checkpoint)
    assert not result.passed
    for comparison in result.comparisons[:5]:
        assert not comparison.passed
        bad = {d.tensor for d in comparison.differences if d.error > 1e-4}
        assert "recurrent.2" in bad
        assert {d.layer for d in comparison.differences if d.tensor in bad} <= {2, None}


def test_a_graph_that_forgets_fails(
    bundle: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that drop a state between calls: right up to position 63, wrong after it."""
    form = verifying.OnnxForm.__call__

    def forgets(self: Any, ids: Any, state: Any) -> Any:
        sequences, state = form(self, ids, state)
        if ids.shape[1] > 1:
            state["conv.0"] *= 0
        return sequences, state

    monkeypatch.setattr(verifying.OnnxForm, "__call__", forgets)
    found = verify(bundle, checkpoint).comparisons
    (chunks,) = (c for c in found if (c.variant, c.form, c.against) == ("model", "chunks", TRUTH))
    assert not chunks.passed
    (logits,) = (d for d in chunks.differences if d.tensor == "logits" and d.length == 130)
    assert max(logits.errors[t] for t in range(64)) < 1e-4 < logits.errors[64]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle whose steps erase nearly all of a state and write little, and its checkpoint."""
    folder = tmp_path_factory.mktemp("narrow")
    made = _checkpoint(folder / "checkpoint", seed=0, layers=("rwkv",), times=0.2)
    export_checkpoint(made, folder / "bundle")
    return folder / "bundle", made


def test_states_that_are_erased(narrow: tuple[Path, Path]) -> None:
    """Rounding of what a random state was must not be large beside what the model writes."""
    for comparison in verify(*narrow).comparisons:
        assert comparison.worst.error < 2e-5, str(comparison)


def test_a_small_fault_in_a_state_that_is_erased(
    narrow: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = verifying.OnnxForm.__call__

    def wrong(self: Any, ids: Any, state: Any) -> Any:
        sequences, state = form(self, ids, state)
        return sequences, {**state, "recurrent.0": 1.001 * state["recurrent.0"]}

    monkeypatch.setattr(verifying.OnnxForm, "__call__", wrong)
    found = [c for c in verify(*narrow).comparisons if c.variant is not None]
    assert found and all(c.worst.tensor == "recurrent.0" and not c.passed for c in found)


def test_limits_where_there_is_no_model(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the export allowed, unless another limit is given, which only rounding may exceed."""
    monkeypatch.setattr(verifying, "allowed_error", lambda opened: 3e-3)
    for given, wanted in ((None, 3e-3), (1e-3, 1e-3)):
        found = verify(bundle, tolerance=given).comparisons
        assert {c.tolerance for c in found if c.variant == "model"} == {wanted}
        assert {c.tolerance for c in found if c.variant != "model"} == {3e-3}


def test_another_checkpoint_is_refused(bundle: Path, tmp_path: Path) -> None:
    other = _checkpoint(tmp_path / "other", seed=1)
    result = _run(bundle, "--checkpoint", other)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {other} is another model")
    assert len(result.stderr.splitlines()) == 1


def test_damage_is_found(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    data = copy / "onnx" / "model_q4.onnx_data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    result = _run(copy)
    assert result.exit_code == 1
    assert "model_q4.onnx_data" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_large_files_are_hashed_too(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "HASH_LIMIT", 10)
    monkeypatch.setattr(verifying, "HASH_LIMIT", 10)
    monkeypatch.setattr(manifests, "sha256", lambda path: "0")
    with pytest.raises(EdgelinError, match="differs from its sha256"):
        verify(bundle)


def test_golden_stream_is_replayed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = load(bundle, variant="model")
    verify_golden.replay_golden(opened)
    read = json.loads

    def moved(text: str) -> Any:
        content = read(text)
        content["states"]["recurrent.0"]["samples"][0][1] += content["states"]["recurrent.0"][
            "max_abs"
        ]
        return content

    monkeypatch.setattr(json, "loads", moved)
    with pytest.raises(EdgelinError, match=r"golden stream: state recurrent\.0 is off by"):
        verify_golden.replay_golden(opened)


def _set(*path: Any, to: Any) -> Any:
    """An edit of the content of ``golden.json``."""

    def edit(content: Any) -> None:
        *parents, last = path
        for parent in parents:
            content = content[parent]
        if to is KeyError:
            del content[last]
        else:
            content[last] = to

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        *(_set("pieces", to=value) for value in (KeyError, "zz", 3, [], [3], {})),
        *(_set("pieces", 0, "ids", to=value) for value in (KeyError, [], [320], [-1], [0.5])),
        *(_set("pieces", 0, "top", to=value) for value in (KeyError, [], {"ids": [0]})),
        *(_set("pieces", 0, "top", "ids", to=value) for value in ([9999], [-1], ["0"], [0])),
        _set("pieces", 0, "top", "logits", 0, to=float("nan")),
        *(_set("tolerance", to=value) for value in (KeyError, 3, {})),
        *(_set("tolerance", "model", to=value) for value in (KeyError, None)),
        *(_set("tolerance", "model", key, to=value) for key in ("logits", "states")
          for value in (KeyError, float("nan"), float("inf"), 0, -1, "1", 10**400)),
        *(_set("states", to=value) for value in (KeyError, {}, [], {"x": 1})),
        _set("states", "x", to={}),
        *(_set("states", "recurrent.0", key, to=value) for key in ("samples", "max_abs")
          for value in (KeyError, [], float("nan"), -1, [[10**9, 0.0]], [[0]], [0])),
    ],
)  # fmt: skip
def test_edited_golden_stream_is_refused(bundle: Path, tmp_path: Path, edit: Any) -> None:
    opened = load(bundle, variant="model")
    content = json.loads((bundle / "golden.json").read_text())
    edit(content)
    (tmp_path / "golden.json").write_text(json.dumps(content))
    opened.path = tmp_path
    with pytest.raises(EdgelinError, match=r"golden\.json (is damaged|lacks)") as caught:
        verify_golden.replay_golden(opened)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "", "zz", "[" * 100_000, "[]", "3", "\udcff"])
def test_golden_stream_that_is_none(bundle: Path, tmp_path: Path, text: str | None) -> None:
    opened = load(bundle, variant="model")
    opened.path = tmp_path
    if text is not None:
        (tmp_path / "golden.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(EdgelinError, match=r"golden\.json (is damaged|cannot be read)"):
        verify_golden.replay_golden(opened)
    del opened.manifest.files["golden.json"]
    with pytest.raises(EdgelinError, match=r"has no golden\.json"):
        verify_golden.replay_golden(opened)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "-1", "x"])
def test_tolerances_that_hold_nothing_are_refused(bundle: Path, value: str) -> None:
    result = _run(bundle, f"--tolerance={value}")
    assert result.exit_code == 2 and "Invalid value for '--tolerance'" in result.stderr


@pytest.mark.parametrize("size", [1, 64, 130])
def test_replay_keeps_positions(size: int) -> None:
    """A sum over tokens, whose value at each position is known."""

    def form(ids: Any, state: Any) -> Any:
        sums = state["sum"] + ids.cumsum(1)
        return {"out": sums}, {"sum": sums[:, -1:]}

    ids = np.arange(2 * 130).reshape(2, 130)
    record = replay(form, ids, {"sum": np.array([[5], [7]])}, size=size)
    assert sorted(record["out"]) == list(range(130))
    for t, rows in record["out"].items():
        assert rows.tolist() == [5 + ids[0, : t + 1].sum(), 7 + ids[1, : t + 1].sum()]
    assert sorted(record["sum"]) == sorted({*range(size - 1, 130, size), 129})


def test_measures() -> None:
    assert relative_error(np.array([1.0, -3.0]), np.array([1.0, -4.0])) == 0.25
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert relative_error(np.array([7]), np.array([7])) == 0.0
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    expected = 0.5 * np.log(2) + 0.5 * np.log(2 / 3)
    assert divergence(p + 3, q - 1) == pytest.approx(expected, rel=1e-12)
