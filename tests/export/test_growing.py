"""A bundle whose state grows: its streams, state files, and what is said about it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from export_models import VOCAB, make_model

import edgelin
from edgelin import checkpoint, tokenizer
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.runtimes import state_file
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream

FIXED = 8 + (112 * 3 + 2 * 16 * 24) * 4  # position; convolution and matrix of gated DeltaNet
GROWTH = 2 * 2 * 8 * 4  # keys and values of two heads, 8 wide
IDS = np.random.default_rng(0).integers(0, VOCAB, (3, 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one recurrent layer and one of attention to all tokens."""
    path = tmp_path_factory.mktemp("growing")
    tokens = tokenizer.train(["a small text of a few words and more words " * 20], VOCAB)
    checkpoint.save(path / "checkpoint", make_model(("gdn", "full")), tokens.to_str())
    export_checkpoint(path / "checkpoint", path / "bundle")
    return path


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return edgelin.load(folder / "bundle", threads=1)


def read(bundle: Bundle, count: int, batch: int = 1) -> Stream:
    """A stream that has read the first ids."""
    stream = bundle.stream(batch)
    stream.feed(IDS[:batch, :count])
    return stream


@pytest.mark.parametrize("batch", [1, 3])
def test_any_split_gives_the_same_numbers(bundle: Bundle, batch: int) -> None:
    ids = IDS[:batch]
    wanted = bundle.stream(batch).feed(ids, all_outputs=True)
    for cuts in ([1, 2, 130], [64, 65, 129], range(1, 300)):
        stream = bundle.stream(batch)
        pieces = np.split(ids, list(cuts), axis=1)
        found = np.concatenate([stream.feed(piece, all_outputs=True) for piece in pieces], axis=1)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_the_state_grows_by_what_is_said(bundle: Bundle, folder: Path) -> None:
    stream = bundle.stream()
    assert stream.state_bytes == FIXED
    for count in (1, 5, 200):
        stream.feed(IDS[0, :count])
        assert stream.state_bytes == FIXED + stream.position * GROWTH
        assert stream.states()["key.1"].shape == (1, 2, stream.position, 8)
    stream.reset()
    assert stream.state_bytes == FIXED
    report = json.loads((folder / "bundle" / "report.json").read_text())
    assert (report["state_bytes"], report["state_bytes_per_step"]) == (FIXED, GROWTH)
    text = (folder / "bundle" / "report.md").read_text()
    assert f"Not constant memory: the state grows by {GROWTH} bytes a token" in text


def test_fork_reset_and_state_files_go_on_alike(bundle: Bundle, tmp_path: Path) -> None:
    first = read(bundle, 130)
    first.save(tmp_path / "s.state")
    loaded = read(bundle, 200)
    loaded.load(tmp_path / "s.state")
    again = read(bundle, 7)
    again.reset()
    again.feed(IDS[0, :130])
    streams = [first, first.fork(), loaded, again]
    for piece in np.split(IDS[0, 130:], [1, 2, 60]):
        outputs = [stream.feed(piece) for stream in streams]
        assert all(np.array_equal(outputs[0], other) for other in outputs[1:])
    assert {stream.state_bytes for stream in streams} == {FIXED + 300 * GROWTH}


@pytest.mark.parametrize("batch", [1, 3])
def test_the_way_back(bundle: Bundle, batch: int) -> None:
    stream, seen = bundle.stream(batch), {}
    stream.checkpoint(every=50)
    for count in (1, 64, 65, 3, 1, 66):
        stream.feed(IDS[:batch, stream.position : stream.position + count])
        seen[stream.position] = [array.tobytes() for array in stream.states().values()]
    for position in sorted(seen, reverse=True):
        stream.rewind(position)
        assert [array.tobytes() for array in stream.states().values()] == seen[position]


def test_rows_begin_in_a_capsule(folder: Path, tmp_path: Path) -> None:
    opened = edgelin.load(shutil.copytree(folder / "bundle", tmp_path / "bundle"), threads=1)
    for dtype, away in (("float32", 1e-6), ("float16", 0.01), ("int8", 0.1)):
        opened.add_capsule("sys", read(opened, 70), dtype=dtype)
        stream = opened.stream(3, capsule="sys")
        found = stream.feed(IDS[:, 70:90])
        for row, wanted in zip(found, IDS[:, 70:90], strict=True):
            right = read(opened, 70).feed(wanted)
            np.testing.assert_allclose(row, right, rtol=0, atol=away * np.abs(right).max())


def test_a_failed_call_changes_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, calls = read(bundle, 40), []
    run, before = stream._buffers.run, stream.states()

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return run(*args, **options)

    monkeypatch.setattr(stream._buffers, "run", failing)
    with pytest.raises(EdgelinError, match="out of luck"):
        stream.feed(IDS[0, 40:])
    for name, array in stream.states().items():
        assert np.array_equal(array, before[name])
    outputs = stream.feed(IDS[0, 40:])
    assert np.array_equal(outputs, read(bundle, 40).feed(IDS[0, 40:]))


def test_a_state_of_another_length_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "s.state"
    read(bundle, 40).save(path)
    saved = state_file.read(path)
    saved.tensors["key.1"] = saved.tensors["key.1"][:, :, 1:].copy()
    state_file.write(path, saved)
    with pytest.raises(
        EdgelinError, match=r"key\.1 is float32 \[1, 2, 39, 8\], .* \[1, 2, 40, 8\]"
    ):
        bundle.stream().load(path)


def test_names_are_those_of_other_exporters(bundle: Bundle, tmp_path: Path) -> None:
    names = {i.name: i.shape for i in bundle.session.get_inputs()}
    assert names["past_key_values.1.key"] == ["batch", 2, "past", 8]
    assert "present.1.value" in {o.name for o in bundle.session.get_outputs()}
    entry = bundle.manifest.as_dict()["states"][2]
    assert (entry["shape"], entry["layout"]) == (
        ["batch", 2, "past", 8],
        "batch heads token channels",
    )
    read(bundle, 3).save(tmp_path / "s.state")
    assert safetensors.numpy.load_file(tmp_path / "s.state")["key.1"].shape == (1, 2, 3, 8)


def test_inspect_says_that_memory_is_not_constant(folder: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(folder / "bundle")])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["total,", "one", "stream", str(FIXED)] in lines
    assert ["not", "constant:", "every", "token", "adds", str(GROWTH)] in lines
    found = json.loads(
        CliRunner().invoke(main, ["inspect", str(folder / "bundle"), "--json"]).stdout
    )
    assert found["state_bytes_per_step"] == GROWTH
