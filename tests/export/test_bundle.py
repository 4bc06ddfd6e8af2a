"""Bundles: what is in them, and that a failed export leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

import edgelin.runtimes
from edgelin import checkpoint
from edgelin.errors import EdgelinError
from edgelin.export import bundle as bundles
from edgelin.export import golden, profiles, store
from edgelin.export.bundle import export_checkpoint
from edgelin.export.trace import trace
from edgelin.export.verify.golden import replay_golden
from edgelin.model import SequenceModel
from edgelin.runtimes.manifest import METADATA_KEY, Manifest
from edgelin.runtimes.signature import Tokens

VARIANTS = ("none", "int8", "int4")


@pytest.fixture(scope="module")
def small_trace(small_checkpoint: Path) -> ir.Model:
    """The trace of the checkpoint, made once."""
    return trace(checkpoint.load(small_checkpoint)[0])


@pytest.fixture(scope="module")
def bundle(
    small_checkpoint: Path,
    small_trace: ir.Model,
    unmeasured: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """A bundle with every variant, measured; tests must not change it."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "trace", lambda model, **options: small_trace.clone())
        patch.setattr(bundles, "measure", unmeasured)
        export_checkpoint(small_checkpoint, out, quantise=VARIANTS)
    yield out


@pytest.fixture
def quick(
    small_checkpoint: Path, small_trace: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``export_checkpoint`` of one float variant."""
    monkeypatch.setattr(bundles, "trace", lambda model, **options: small_trace.clone())

    def run(out: Path, **options: Any) -> Any:
        return export_checkpoint(small_checkpoint, out, **options)

    return run


def test_manifest_describes_the_folder(bundle: Path, small_checkpoint: Path) -> None:
    manifest = Manifest.read(bundle)
    model, _ = checkpoint.load(small_checkpoint)
    assert manifest.states == model.state_specs()
    assert manifest.input == Tokens(model.config.vocab_size)
    assert (manifest.profile, manifest.opset, manifest.max_time) == ("fused", 21, 64)
    assert manifest.default_variant == "model_q8"
    listed = set(manifest.files) | {"edgelin.json"}
    for variant in manifest.variants.values():
        listed |= set(variant.files)
    present = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert listed == present
    assert [p.name for p in bundle.parent.iterdir()] == [bundle.name]
    for name in manifest.variants:
        manifest.check_files(bundle, name)


def test_graphs_carry_the_contract_and_nothing_of_this_machine(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    for variant in manifest.variants.values():
        model = onnx.load(str(bundle / variant.file), load_external_data=False)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        assert json.loads(metadata.pop(METADATA_KEY)) == manifest.io_part()
        assert not metadata
        assert b"/work/" not in model.SerializeToString()
        assert str(Path.home()).encode() not in model.SerializeToString()


def test_data_file_is_aligned_and_shared(bundle: Path) -> None:
    for variant in Manifest.read(bundle).variants.values():
        places = list(store.external_tensors(bundle / variant.file))
        for _, offset, length in places:
            assert offset % (1 << 16 if length >= 1 << 16 else 16) == 0
        if variant.quantisation is not None:
            codes = [place[1:] for place in places if place[0].startswith("embedding.weight_q8")]
            assert len(codes) == 2 and codes[0] == codes[1]


def test_small_tensors_stay_in_the_graph(bundle: Path) -> None:
    model = onnx.load(str(bundle / "onnx" / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        size = int(np.prod(tensor.dims)) * 4
        assert (tensor.data_location == onnx.TensorProto.EXTERNAL) == (size >= 1024), tensor.name


def test_weights_in_several_files(
    quick: Callable[..., Any], bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of more than 2 GB: the same weights, and every file is in the manifest."""
    monkeypatch.setattr(store, "save", functools.partial(store.save, shard_bytes=60_000))
    quick(tmp_path / "out")
    (variant,) = Manifest.read(tmp_path / "out").variants.values()
    data = ["onnx/model.onnx_data", *(f"onnx/model.onnx_data_{i}" for i in (1, 2))]
    assert sorted(variant.files) == sorted(["onnx/model.onnx", *data])
    assert all((tmp_path / "out" / name).stat().st_size <= 60_000 for name in data)
    logits = [
        edgelin.runtimes.load(folder, variant="model").stream().feed([3, 1, 4])
        for folder in (bundle, tmp_path / "out")
    ]
    np.testing.assert_array_equal(*logits)


def test_int4_where_there_are_mixers_only(tmp_path: Path, small_checkpoint: Path) -> None:
    """What keeps 8 bits beside 4-bit MLPs has 4 where there are none."""
    config = dataclasses.replace(
        checkpoint.read_config(small_checkpoint), intermediate_size=0, layers=("gdn",)
    )
    tokens = (small_checkpoint / "tokenizer.json").read_text()
    checkpoint.save(tmp_path / "model", SequenceModel(config), tokens)
    (found,) = export_checkpoint(
        tmp_path / "model", tmp_path / "out", quantise=("int4",)
    ).variants.values()
    bits = {name: matrix["bits"] for name, matrix in found.matrices.items()}
    assert bits.pop("embedding.weight") == 8
    assert set(bits.values()) == {4} and "blocks.0.mixer.out_proj.weight" in bits


def test_golden_file_can_be_replayed(bundle: Path) -> None:
    content = json.loads((bundle / golden.FILE_NAME).read_bytes())
    assert [len(piece["ids"]) for piece in content["pieces"]] == [1, 1, 63, 64, 1]
    for variant, allowed in content["tolerance"].items():
        stream = edgelin.runtimes.load(bundle, variant=variant).stream()
        for piece in content["pieces"]:
            logits = stream.feed(piece["ids"])
            wrong = np.abs(logits[piece["top"]["ids"]] - piece["top"]["logits"])
            assert wrong.max() <= allowed["logits"]
        for name, value in stream.states().items():
            wanted = content["states"][name]
            for index, sample in wanted["samples"]:
                error = abs(value[0].reshape(-1)[index] - sample)
                assert error <= allowed["states"] * wanted["max_abs"]


def test_report_names_every_variant(bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_bytes())
    assert report["failures"] == []
    assert list(report["variants"]) == ["model", "model_q8", "model_q4"]
    for variant in report["variants"].values():
        assert variant["measured"]["decode_tokens_per_s"] > 0
    floats = report["variants"]["model"]
    assert floats["graph"]["outputs"] < 1e-5 and floats["graph"]["states"] < 1e-5
    assert "| model_q4 | as trained |" in (bundle / "report.md").read_text()


def test_gate_projections_stay_float(bundle: Path) -> None:
    report = json.loads((bundle / "report.json").read_bytes())
    rounded = report["variants"]["model_q4"]["matrices"]
    assert "blocks.0.mixer.qkv_gate_proj.weight" in rounded
    assert not [name for name in rounded if "decay" in name or "beta" in name]


def _nothing_left(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


def test_full_disk_leaves_nothing(
    quick: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundles.store, "save", full)
    out = tmp_path / "out"
    with pytest.raises(EdgelinError) as caught:
        quick(out)
    assert str(caught.value) == (
        f"{out} cannot be written: No space left on device; free some space or choose another --out"
    )
    _nothing_left(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_crash_leaves_the_old_bundle(
    error: BaseException,
    quick: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "edgelin.json").write_text("old")

    def crash(*args: Any) -> None:
        raise error

    monkeypatch.setattr(golden, "replay", crash)
    with pytest.raises(type(error)):
        quick(out, force=True)
    _nothing_left(tmp_path, "out")
    assert (out / "edgelin.json").read_text() == "old"


def test_missed_gate_keeps_the_bundle_aside(
    quick: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = golden.replay

    def wrong(*args: Any) -> golden.Stream:
        stream = right(*args)
        return dataclasses.replace(stream, outputs=stream.outputs * 1.01)

    monkeypatch.setattr(golden, "replay", wrong)
    with pytest.raises(EdgelinError, match=r"model: outputs are off by 0\.01, limit 0\.0001; see"):
        quick(tmp_path / "out")
    _nothing_left(tmp_path, "out.failed")
    report = json.loads((tmp_path / "out.failed" / "report.json").read_bytes())
    assert report["failures"] == ["model: outputs are off by 0.01, limit 0.0001"]


def test_existing_target_is_kept_or_replaced(quick: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "edgelin.json").write_text("old")
    with pytest.raises(EdgelinError, match="exists; choose another --out"):
        quick(out)
    assert (out / "edgelin.json").read_text() == "old"
    report = quick(out, force=True)
    assert report.bundle == out
    assert Manifest.read(out).default_variant == "model"
    _nothing_left(tmp_path, "out")


def test_capsules_go_with_the_bundle_that_made_them(
    bundle: Path, quick: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(bundle, tmp_path / "out")
    opened = edgelin.load(out, threads=1)
    stream = opened.stream()
    stream.feed([1, 2, 3])
    opened.add_capsule("sys", stream, default=True)
    replay_golden(edgelin.load(out, threads=1))  # begins at the beginning all the same
    quick(out, force=True)
    assert "is replaced with its capsules (sys): make them again" in capsys.readouterr().err
    assert Manifest.read(out).capsules == {} and not (out / "capsules").exists()
    assert edgelin.load(out, threads=1).stream().position == 0


def test_a_target_that_appears_meanwhile_is_kept(
    quick: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, right = tmp_path / "out", golden.write

    def slow(*args: Any) -> None:
        right(*args)
        out.mkdir()
        (out / "edgelin.json").write_text("another export's")

    monkeypatch.setattr(golden, "write", slow)
    with pytest.raises(EdgelinError, match="made by another program during the export"):
        quick(out)
    assert (out / "edgelin.json").read_text() == "another export's"
    _nothing_left(tmp_path, "out")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_is_followed(
    there: bool, quick: Callable[..., Any], tmp_path: Path
) -> None:
    if there:
        (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    quick(tmp_path / "link", force=there)
    assert (tmp_path / "link").is_symlink()
    Manifest.read(tmp_path / "folder")
    _nothing_left(tmp_path, "folder", "link")


def test_weights_that_are_not_finite_are_refused(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bundles, "trace", lambda model, **options: pytest.fail("traced for nothing")
    )
    broken = shutil.copytree(small_checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(EdgelinError, match=r"norm\.weight holds NaN or infinity; take an"):
        export_checkpoint(broken, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(decoder=None), "has a decoder that is not known"),
        (lambda content: content["model"]["vocab"].update({"w": 5000}), "has token id 5000"),
    ],
)
def test_a_tokenizer_that_no_runtime_opens_is_refused(
    change: Callable[[Any], None],
    message: str,
    small_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        bundles, "trace", lambda model, **options: pytest.fail("traced for nothing")
    )
    broken = shutil.copytree(small_checkpoint, tmp_path / "broken")
    content = json.loads((broken / "tokenizer.json").read_text())
    change(content)
    (broken / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(EdgelinError, match=message):
        export_checkpoint(broken, tmp_path / "out")


def test_unknown_variant_and_profile(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match="'int3'; allowed: none, int8, int4"):
        export_checkpoint(small_checkpoint, tmp_path / "out", quantise=("int3",))
    with pytest.raises(EdgelinError, match="'fast'; allowed: fused, plain, onnx"):
        export_checkpoint(small_checkpoint, tmp_path / "out", profile="fast")


def test_old_onnxruntime_is_refused() -> None:
    needed = profiles.find("fused").min_onnxruntime(quantised=False)
    profiles.check_onnxruntime(needed, "1.25.1")
    profiles.check_onnxruntime(needed, "1.26.0.dev20260101")
    with pytest.raises(EdgelinError, match=r"onnxruntime 1\.25\.0 cannot run this profile"):
        profiles.check_onnxruntime(needed, "1.25.0")


def test_bad_checkpoints(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(EdgelinError, match="no checkpoint folder"):
        export_checkpoint(tmp_path / "none", out)
    broken = tmp_path / "broken"
    shutil.copytree(small_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EdgelinError, match=r"model\.safetensors is damaged"):
        export_checkpoint(broken, out)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(EdgelinError, match="'llama'"):
        export_checkpoint(broken, out)
    shutil.copyfile(small_checkpoint / "config.json", broken / "config.json")
    shutil.copyfile(small_checkpoint / "model.safetensors", weights)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(EdgelinError, match=r"no tokenizer\.json"):
        export_checkpoint(broken, out)
    _nothing_left(tmp_path, "broken")
