"""A stream that begins in a capsule goes on as one that read the prompt; a bundle stays whole."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import capsules, state_file
from edgelin.runtimes.manifest import FILE_NAME, Manifest, digest
from edgelin.runtimes.session import Bundle

PROMPT = "The quiet river runs past Köln, "
SAMPLING: dict[str, Any] = {"seed": 3, "repetition_penalty": 1.3, "top_k": 0, "max_tokens": 30}


@pytest.fixture
def bundle(tiny: Any, tmp_path: Path) -> Bundle:
    """A bundle of its own for each test, because they change it."""
    return edgelin.load(shutil.copytree(tiny.path, tmp_path / "bundle"), threads=1)


def _files(bundle: Bundle) -> dict[str, bytes]:
    paths = [path for path in bundle.path.rglob("*") if path.is_file()]
    return {str(path.relative_to(bundle.path)): path.read_bytes() for path in paths}


def _read(bundle: Bundle, text: str = PROMPT) -> Any:
    return capsules.read_prompt(bundle, text)


def test_it_goes_on_as_the_prompt_does(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bundle.stream()
    text = "".join(whole.generate(PROMPT, **SAMPLING))
    bundle.add_capsule("sys", _read(bundle))
    stream = edgelin.load(bundle.path, threads=1).stream(capsule="sys")
    counted: list[int] = []
    run = stream._buffers.run

    def counting(inputs: Any, **options: Any) -> Any:
        counted.append(inputs.shape[1])
        return run(inputs, **options)

    monkeypatch.setattr(stream._buffers, "run", counting)
    assert "".join(stream.generate(**SAMPLING)) == text
    assert counted == [1] * 30  # nothing of the prompt is read again
    assert stream.position == whole.position
    assert stream.logits is not None and whole.logits is not None
    assert stream.logits.tobytes() == whole.logits.tobytes()
    for name, array in whole.states().items():
        assert stream.states()[name].tobytes() == array.tobytes()


def test_rows_begin_in_it_alike(tiny: Any, bundle: Bundle) -> None:
    bundle.add_capsule("sys", _read(bundle))
    ids = bundle.text.encode(PROMPT)
    rows = np.array([[1, 2], [3, 4], [5, 6]])
    stream = bundle.stream(3, capsule="sys")
    assert stream.logits is not None and stream.logits.shape == (3, tiny.vocab_size)
    found = stream.feed(rows)
    for row, logits in zip(rows, found, strict=True):
        wanted = tiny.reference([*ids, *row])[0][-1]
        np.testing.assert_allclose(logits, wanted, atol=1e-4)
    stream.reset()
    assert stream.position == len(ids)
    assert stream.feed(rows).tobytes() == found.tobytes()
    assert stream.fork().feed(rows).tobytes() == stream.feed(rows).tobytes()


def test_the_default_one(bundle: Bundle) -> None:
    length = len(bundle.text.encode(PROMPT))
    bundle.add_capsule("sys", _read(bundle), default=True)
    bundle.add_capsule("other", _read(bundle, "a"))
    for opened in (bundle, edgelin.load(bundle.path, threads=1)):
        assert opened.manifest.default_capsule == "sys"
        assert opened.stream().position == length
        assert opened.stream(capsule="other").position == 1
        assert opened.stream(capsule="none").position == 0
    bundle.add_capsule("sys", _read(bundle, "b"))
    assert bundle.manifest.default_capsule == "sys" and bundle.stream().position == 1
    bundle.add_capsule("other", _read(bundle), default=True)
    assert bundle.manifest.default_capsule == "other" and bundle.stream().position == length


def test_measures_begin_at_the_beginning(bundle: Bundle) -> None:
    from edgelin.runtimes import evaluate

    before = evaluate.evaluate(bundle, "The old mill.")
    bundle.add_capsule("sys", _read(bundle), default=True)
    assert evaluate.evaluate(bundle, "The old mill.") == before


def test_pools_begin_in_it_too(tiny: Any, bundle: Bundle) -> None:
    bundle.add_capsule("sys", _read(bundle), default=True)
    ids = bundle.text.encode(PROMPT)
    pool = bundle.pool(3)
    first, second, third = pool.add(), pool.add(capsule="none"), pool.add(capsule="sys")
    assert [pool.position(slot) for slot in (first, second, third)] == [len(ids), 0, len(ids)]
    assert pool.recent(first) == ids[-64:] and pool.outputs(second) is None
    found = pool.feed({first: [1, 2], second: [3], third: [4]})
    for slot, read in ((first, [*ids, 1, 2]), (second, [3]), (third, [*ids, 4])):
        np.testing.assert_allclose(found[slot], tiny.reference(read)[0][-1], atol=1e-4)
    pool.reset(first)
    np.testing.assert_allclose(pool.feed({first: [1, 2]})[first], found[first], atol=1e-5)
    with pytest.raises(EdgelinError, match="has no capsule 'no'"):
        pool.add(capsule="no")
    assert len(pool) == 3


def test_it_is_a_state_file_that_the_manifest_records(bundle: Bundle, tmp_path: Path) -> None:
    stream = _read(bundle)
    file = bundle.add_capsule("sys", stream)
    content = (bundle.path / file).read_bytes()
    entry = json.loads((bundle.path / FILE_NAME).read_bytes())["capsules"]["sys"]
    sha256 = hashlib.sha256(content).hexdigest()
    assert entry == {"file": file, "sha256": sha256, "bytes": len(content)}
    stream.save(tmp_path / "s.state")
    assert _same(tmp_path / "s.state", bundle.path / file)
    loaded = bundle.stream()
    loaded.load(bundle.path / file)
    assert loaded.position == stream.position


def _same(one: Path, other: Path) -> bool:
    found, wanted = state_file.read(one), state_file.read(other)
    bare = [dataclasses.replace(saved, tensors={}) for saved in (found, wanted)]
    tensors = zip(found.tensors.values(), wanted.tensors.values(), strict=True)
    return bare[0] == bare[1] and all(a.tobytes() == b.tobytes() for a, b in tensors)


def test_one_is_replaced_and_removed_without_a_trace(bundle: Bundle) -> None:
    before = _files(bundle)
    first = bundle.add_capsule("sys", _read(bundle))
    second = bundle.add_capsule("sys", _read(bundle, "other"), default=True)
    assert first != second
    assert _files(bundle).keys() - before.keys() == {second}
    third = bundle.add_capsule("sys", _read(bundle, "other"))
    assert _files(bundle).keys() - before.keys() == {third} and bundle.stream().position > 0
    capsules.remove(bundle.path, "sys")
    assert _files(bundle).keys() == before.keys()
    assert not (bundle.path / "capsules").exists()
    manifest = Manifest.read(bundle.path)
    assert manifest.capsules == {} and manifest.default_capsule is None
    with pytest.raises(EdgelinError, match="has no capsule 'sys'; it has: none"):
        capsules.remove(bundle.path, "sys")


@pytest.mark.parametrize("place", ["Manifest.write", "state_file.write", "os.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_bundle_as_it_was(
    bundle: Bundle, place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.add_capsule("sys", _read(bundle), default=True)
    before = _files(bundle)
    stream = _read(bundle, "another")

    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(f"edgelin.runtimes.capsules.{place}", fail)
    with pytest.raises(EdgelinError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        bundle.add_capsule("sys", stream)
    if isinstance(error, OSError):
        assert "No space left on device" in str(caught.value)
    monkeypatch.undo()
    assert _files(bundle) == before
    assert bundle.stream().position == len(bundle.text.encode(PROMPT))


def test_others_wait_while_one_changes_the_bundle(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    opened = edgelin.load(bundle.path, threads=1)  # knows nothing of what others add
    write, tried = Manifest.write, []

    def watched(manifest: Manifest, folder: Path) -> Path:
        handle = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        tried.append(folder)
        return write(manifest, folder)

    monkeypatch.setattr(Manifest, "write", watched)
    bundle.add_capsule("a", _read(bundle))
    opened.add_capsule("b", _read(opened))
    capsules.remove(bundle.path, "a")
    assert len(tried) == 3
    assert [*Manifest.read(bundle.path).capsules] == ["b"]


def test_a_changed_file_is_refused_where_it_is_used(bundle: Bundle) -> None:
    file = bundle.add_capsule("sys", _read(bundle))
    bundle.add_capsule("other", _read(bundle, "a"))
    content = (bundle.path / file).read_bytes()
    opened = edgelin.load(bundle.path, threads=1)
    for damaged in (content[:-1], content[:-1] + b"\1", None):
        if damaged is None:
            (bundle.path / file).unlink()
        else:
            (bundle.path / file).write_bytes(damaged)
        with pytest.raises(EdgelinError, match="make the capsule again with `edgelin prompt`"):
            opened.stream(capsule="sys")
    assert opened.stream().position == 0 and opened.stream(capsule="other").position == 1


def test_another_models_capsule_is_refused(bundle: Bundle, build: Any, tmp_path: Path) -> None:
    other = edgelin.load(build(tmp_path / "x", seed=1, model_hash="22" * 32).path, threads=1)
    with pytest.raises(EdgelinError, match="the stream was saved by another model"):
        other.add_capsule("sys", _read(bundle))
    file = bundle.add_capsule("sys", _read(bundle))
    content = json.loads((other.path / FILE_NAME).read_text())
    content["capsules"] = json.loads((bundle.path / FILE_NAME).read_text())["capsules"]
    content["digest"] = digest(content)
    (other.path / FILE_NAME).write_text(json.dumps(content))
    shutil.copytree(bundle.path / "capsules", other.path / "capsules")
    assert (other.path / file).exists()
    with pytest.raises(EdgelinError, match="was saved by another model"):
        edgelin.load(other.path, threads=1).stream(capsule="sys")
    shutil.copy(other.path / FILE_NAME, bundle.path / FILE_NAME)
    with pytest.raises(EdgelinError, match="was exported again from another model; open it anew"):
        bundle.add_capsule("sys", _read(bundle))


@pytest.mark.parametrize(
    "name", ["", "none", "Sys", "a b", "../x", "-a", "a/b", "a.b", "a" * 65, "ü"]
)
def test_names(bundle: Bundle, name: str) -> None:
    with pytest.raises(EdgelinError, match=r"the capsule's name is .*allowed: 1 to 64 of a-z"):
        bundle.add_capsule(name, _read(bundle))


def test_refusals(bundle: Bundle) -> None:
    with pytest.raises(EdgelinError, match="has no capsule 'sys'; allowed: none"):
        bundle.stream(capsule="sys")
    with pytest.raises(EdgelinError, match="has read nothing yet"):
        bundle.add_capsule("sys", bundle.stream())
    rows = bundle.stream(2)
    rows.feed([[1], [2]])
    with pytest.raises(EdgelinError, match="another batch size"):
        bundle.add_capsule("sys", rows)
    with pytest.raises(EdgelinError, match="prompt is empty"):
        _read(bundle, "")
    assert not (bundle.path / "capsules").exists()


@pytest.mark.parametrize(
    ("capsules_", "default", "message"),
    [
        ([], None, "capsules is"),
        ({"a": {"sha256": "00", "bytes": 1}}, None, "KeyError 'file'"),
        ({"a": {"file": 3, "sha256": "00", "bytes": 1}}, None, "capsules.a.file is 3"),
        ({"a": {"file": "../a", "sha256": "00", "bytes": 1}}, None, "lies outside the bundle"),
        ({}, "a", "default_capsule 'a' is not among capsules"),
        ({}, 3, "default_capsule is 3"),
    ],
)
def test_odd_manifests(bundle: Bundle, capsules_: Any, default: Any, message: str) -> None:
    content = json.loads((bundle.path / FILE_NAME).read_text())
    content.update(capsules=capsules_, default_capsule=default)
    content["digest"] = digest(content)
    with pytest.raises(EdgelinError, match=message):
        Manifest.from_dict(content)


def test_a_manifest_from_before_capsules(bundle: Bundle) -> None:
    content = json.loads((bundle.path / FILE_NAME).read_text())
    del content["capsules"], content["default_capsule"]
    content["digest"] = digest(content)
    manifest = Manifest.from_dict(content)
    assert manifest.capsules == {} and manifest.default_capsule is None


def test_features_have_capsules_as_well(sensor: Any, tmp_path: Path) -> None:
    bundle = edgelin.load(shutil.copytree(sensor.path, tmp_path / "bundle"), threads=1)
    steps = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    warm = bundle.stream()
    warm.feed(steps[:5])
    bundle.add_capsule("warm", warm, default=True, dtype="float32")
    assert bundle.stream().feed(steps[5:]).tobytes() == warm.feed(steps[5:]).tobytes()
