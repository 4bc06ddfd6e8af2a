"""``replacing``: whole files or none, and nothing but files is ever replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from edgelin.files import replacing


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as part:
        part.write_bytes(content)


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as part:
            part.unlink(missing_ok=True)
            part.touch(mode=0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "a").touch(mode=0o600)
    _write(tmp_path / "a", b"new")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("there/file")
    _write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_a_pipe_stays_and_gets_the_content(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    _write(pipe, b"content")
    reader.join(10)
    assert got == [b"content"]
    assert pipe.is_fifo()


def test_a_device_stays(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to(os.devnull)  # were it replaced, only the link would be lost
    _write(link, b"content")
    assert link.is_symlink() and link.is_char_device()


def test_a_folder_is_refused_before_writing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), replacing(tmp_path / "folder"):
        pytest.fail("written for nothing")


def test_content_is_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), rename(a, b)))
    _write(tmp_path / "a", b"content")
    assert done == ["fsync", "replace"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as part:
        part.write_bytes(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
