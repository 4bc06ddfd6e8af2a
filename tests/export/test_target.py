"""Where a bundle is put: nothing is removed but what an export made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgelin.errors import EdgelinError
from edgelin.export import target
from edgelin.files import staging


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "run" / "model").mkdir(parents=True)
    return tmp_path / "run" / "model"


def _folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("old")
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: _folder(path, "thesis.txt"), "is no bundle"),
        (lambda path: _folder(path, "config.json", "model.safetensors"), "is no bundle"),
        (lambda path: _folder(path, "edgelin.json", "notes.txt"), "holds notes.txt"),
        (lambda path: path.write_text("mine"), "is no folder"),
        (os.mkfifo, "is no folder"),
    ],
)
@pytest.mark.parametrize("name", ["out", "out.failed"])
def test_what_no_export_made_is_never_replaced(
    make: Callable[[Path], Any], message: str, name: str, checkpoint: Path, tmp_path: Path
) -> None:
    make(tmp_path / name)
    with pytest.raises(EdgelinError, match=f"{message}.*move it away or choose another --out"):
        target.find(checkpoint, tmp_path / "out", force=True)
    new = _folder(tmp_path / "new", "edgelin.json")
    with pytest.raises(EdgelinError, match=message):
        target.put(new, tmp_path / name, force=True)


@pytest.mark.parametrize("names", [(), ("edgelin.json", "config.json"), ("report.md",)])
def test_bundles_and_empty_folders_are_replaced(
    names: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    _folder(tmp_path / "out", *names)
    out = target.find(checkpoint, tmp_path / "out", force=True)
    with staging(out) as folder:
        (folder / "edgelin.json").write_text("new")
        target.put(folder, out, force=True)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"edgelin.json": "new"}
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize("out", ["run/model", "run", ".", "run/model/bundle", "link", "link/x"])
def test_target_and_checkpoint_do_not_lie_in_each_other(
    out: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    (checkpoint / "edgelin.json").touch()
    with pytest.raises(EdgelinError, match="must not lie in each other; choose another --out"):
        target.find(checkpoint, tmp_path / out, force=True)


def test_links_that_lead_nowhere_and_the_root_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(EdgelinError, match="link to itself"):
        target.find(checkpoint, tmp_path / "loop", force=True)
    with pytest.raises(EdgelinError, match="no name for a folder"):
        target.find(checkpoint, Path("/"), force=True)


def test_a_target_that_appeared_is_kept_without_force(tmp_path: Path) -> None:
    new = _folder(tmp_path / "new", "edgelin.json")
    _folder(tmp_path / "out", "edgelin.json")
    with pytest.raises(EdgelinError, match=r"out was made by another program.*--force"):
        target.put(new, tmp_path / "out", force=False)
    assert (tmp_path / "out" / "edgelin.json").read_text() == "old"


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_a_failed_rename_puts_the_old_bundle_back(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = _folder(tmp_path / "new")
    out = _folder(tmp_path / "out", "edgelin.json")
    rename = Path.rename

    def busy(self: Path, to: Path) -> Path:
        if self == new:
            raise error
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(type(error)):
        target.put(new, out, force=True)
    assert (out / "edgelin.json").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["new", "out"]


@pytest.mark.parametrize(
    ("number", "space"), [(errno.ENOSPC, True), (errno.EROFS, False), (errno.EACCES, False)]
)
def test_only_a_full_disk_asks_for_space(number: int, space: bool, tmp_path: Path) -> None:
    with pytest.raises(EdgelinError) as caught, staging(tmp_path / "out"):
        raise OSError(number, os.strerror(number))
    assert ("free some space" in str(caught.value)) == space
    assert str(caught.value).endswith("choose another --out")


def test_a_bundle_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with staging(tmp_path / "out") as folder:
            assert folder.stat().st_mode & 0o777 == 0o750
    finally:
        os.umask(before)
