"""Files of features: what is read, what windows of it are, and a line for all that can be wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgelin.config import FeatureConfig
from edgelin.errors import EdgelinError
from edgelin.train.dataset import load

X = np.arange(12, dtype=np.float32).reshape(6, 2)
LENGTHS = np.array([3, 1, 2])
ANSWERS = {
    ("sequence", "classification"): np.array([2, 0, 1]),
    ("step", "classification"): np.array([0, -1, 2, 1, 1, -1]),
    ("sequence", "regression"): np.arange(9, dtype=np.float32).reshape(3, 3),
    ("step", "regression"): np.arange(18, dtype=np.float32).reshape(6, 3),
}


def _features(head: str = "sequence", task: str = "classification") -> FeatureConfig:
    return FeatureConfig(size=2, outputs=3, head=head, task=task)


def _write(path: Path, **changes: Any) -> Path:
    arrays = {"x": X, "lengths": LENGTHS, "y": ANSWERS["sequence", "classification"]} | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.mark.parametrize(("head", "task"), ANSWERS)
def test_windows_are_parts_of_their_sequences(tmp_path: Path, head: str, task: str) -> None:
    y = ANSWERS[head, task]
    data = load([_write(tmp_path / "a.npz", y=y)], _features(head, task))
    rows = np.array([2, 0]), np.array([0, 1]), np.array([1, 2])  # a frame; the last two
    x, answers, wanted = data.windows(*rows)
    assert x.tolist() == [[[8, 9], [8, 9]], [[2, 3], [4, 5]]]
    if head == "sequence":
        assert wanted.tolist() == [[True, False], [False, True]]
        assert answers[wanted].tolist() == [y[2].tolist(), y[0].tolist()]
    elif task == "classification":
        assert wanted.tolist() == [[True, False], [False, True]]  # y[1] is -1
        assert answers[wanted].tolist() == [1, 2]
    else:
        assert wanted.tolist() == [[True, False], [True, True]]
        assert answers[wanted].tolist() == y[[4, 1, 2]].tolist()


def test_files_follow_one_another(tmp_path: Path) -> None:
    one = _write(tmp_path / "a.npz")
    two = _write(tmp_path / "b.npz", x=X[:2] + 50, lengths=np.array([2]), y=np.array([1]))
    data = load([one, two], _features())
    assert data.lengths.tolist() == [3, 1, 2, 2]
    assert data.y.tolist() == [2, 0, 1, 1]
    x, _, _ = data.windows(np.array([3]), np.array([0]), np.array([2]))
    assert torch.equal(x[0], torch.from_numpy(X[:2] + 50))


NAN = X.copy()
NAN[4, 1] = np.nan


@pytest.mark.parametrize(
    ("head", "task", "changes", "message"),
    [
        ("sequence", "", {"lengths": None}, "{} lacks the array 'lengths'; it has: x, y"),
        ("sequence", "", {"x": X.astype(float)}, "{}: x is float64; float32 is needed: convert it"),
        ("sequence", "", {"x": X[0]}, "{}: x has shape [2]; [frames, 2] is needed"),
        (
            "sequence",
            "",
            {"x": X.reshape(4, 3)},
            "{}: x has 3 features a frame, the model reads 2 (model.features.size); take",
        ),
        ("sequence", "", {"x": NAN}, "{}: x[4, 1] is nan; only finite numbers are allowed"),
        ("sequence", "", {"lengths": LENGTHS.astype("i4")}, "{}: lengths is int32; int64 is"),
        ("sequence", "", {"lengths": LENGTHS[:0]}, "{}: lengths has shape [0]; [sequences] is ne"),
        ("sequence", "", {"lengths": np.array([4, 0, 2])}, "{}: lengths[1] is 0; a sequence has"),
        ("sequence", "", {"lengths": LENGTHS + 1}, "{}: lengths add up to 9, x has 6 frames"),
        ("sequence", "", {"y": np.zeros(3, "f4")}, "{}: y is float32; int64 is needed"),
        (
            "sequence",
            "",
            {"y": np.zeros(6, "i8")},
            "{}: y has shape [6]; classification with head 'sequence' needs [3]",
        ),
        ("step", "", {}, "{}: y has shape [3]; classification with head 'step' needs [6]"),
        (
            "sequence",
            "",
            {"y": np.array([0, 3, 1])},
            "{}: y[1] is 3; classes are 0 to 2 with model.features.outputs = 3",
        ),
        ("sequence", "", {"y": np.array([0, 1, -1])}, "{}: y[2] is -1; classes are 0 to 2 with"),
        ("step", "", {"y": np.array([0, 1, -1, -2, 0, 0])}, "{}: y[3] is -2; classes are -1 to 2"),
        ("step", "", {"y": np.full(6, -1)}, "{}: y is -1 everywhere; give at least one frame a cl"),
        ("step", "regression", {"y": np.zeros((6, 3))}, "{}: y is float64; float32 is needed"),
        ("step", "regression", {"y": np.zeros(6, "f4")}, "{}: y has shape [6]; regression with he"),
        ("sequence", "regression", {"y": np.full((3, 3), np.inf, "f4")}, "{}: y[0, 0] is inf; on"),
    ],
)
def test_errors(
    tmp_path: Path, head: str, task: str, changes: dict[str, Any], message: str
) -> None:
    path = _write(tmp_path / "a.npz", **changes)
    with pytest.raises(EdgelinError) as error:
        load([path], _features(head, task or "classification"))
    assert str(error.value).startswith(message.format(path))
    assert "\n" not in str(error.value)


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"cannot read the features .*none\.npz: No such file"):
        load([tmp_path / "none.npz"], _features())
    path = tmp_path / "a.npz"
    np.save(tmp_path / "a.npy", X)
    whole = _write(path).read_bytes()
    encrypted = bytearray(whole)
    encrypted[whole.index(b"PK\1\2") + 8] |= 1
    for content in (b"", b"PK\3\4 no zip", pickle.dumps({"x": 1}), whole[:300], encrypted):
        path.write_bytes(content)
        with pytest.raises(EdgelinError, match=r"a\.npz is no readable \.npz file") as error:
            load([path], _features())
        assert "\n" not in str(error.value)
    with pytest.raises(EdgelinError, match=r"a\.npy is no \.npz file; write it by numpy\.savez"):
        load([tmp_path / "a.npy"], _features())
    _write(path, y=np.array([{}, {}, {}]))
    with pytest.raises(EdgelinError, match=r"a\.npz is no readable .*without objects"):
        load([path], _features())
