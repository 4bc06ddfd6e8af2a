"""``edgelin prompt``: capsules in files and in bundles, and going on from them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgelin
from edgelin.cli import main
from edgelin.runtimes.manifest import Manifest

SETTINGS = ["--seed", "5", "--max-tokens", "30", "--threads", "1"]


def _edgelin(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], input=stdin)


def _done(*arguments: Any, stdin: str | None = None) -> Result:
    result = _edgelin(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def _failed(*arguments: Any) -> str:
    """The one-line error of a command that failed."""
    result = _edgelin(*arguments)
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def bundle(tiny: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path, tmp_path / "bundle"))


def test_a_file(tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "sys.state"
    (tmp_path / "p.txt").write_text("Grüße aus", encoding="utf-8")
    whole = _done("run", tiny.path, "Grüße aus", *SETTINGS).stdout
    inputs = {"Grüße aus": None, f"--file={tmp_path}/p.txt": None, "--file=-": "Grüße aus"}
    for given, stdin in inputs.items():
        shown = _done("prompt", tiny.path, given, "-o", out, stdin=stdin).stdout
        count = len(edgelin.load(tiny.path).text.encode("Grüße aus"))
        assert shown == f"{out}: {count} tokens, {out.stat().st_size} bytes\n"
        assert _done("run", tiny.path, "--load-state", out, *SETTINGS).stdout == whole
        out.unlink()


def test_capsules_of_a_bundle(bundle: Path) -> None:
    whole = _done("run", bundle, "Grüße aus", *SETTINGS).stdout
    other = _done("run", bundle, "The", *SETTINGS).stdout
    shown = _done("prompt", bundle, "Grüße aus", "--name", "sys").stdout
    assert shown.startswith(f"{bundle}/capsules/sys-")
    assert _done("run", bundle, "--capsule", "sys", *SETTINGS).stdout == whole
    assert _done("run", bundle, "The", *SETTINGS).stdout == other  # it is not the default one
    more = _done("run", bundle, "--capsule", "sys", " Köln", *SETTINGS).stdout
    _done("prompt", bundle, "Grüße aus", "--name", "first", "--default")
    assert _done("run", bundle, " Köln", *SETTINGS).stdout == more
    assert _done("run", bundle, "The", "--capsule", "none", *SETTINGS).stdout == other
    _done("prompt", bundle, "--remove", "first")
    assert _done("run", bundle, "The", *SETTINGS).stdout == other
    assert [*Manifest.read(bundle).capsules] == ["sys"]


def test_a_state_file_goes_before_the_default(bundle: Path, tmp_path: Path) -> None:
    whole = _done("run", bundle, "The", *SETTINGS).stdout
    _done("prompt", bundle, "The", "-o", tmp_path / "s.state")
    _done("prompt", bundle, "Grüße aus", "--name", "sys", "--default")
    assert _done("run", bundle, "--load-state", tmp_path / "s.state", *SETTINGS).stdout == whole
    error = _failed("run", bundle, "--load-state", tmp_path / "s.state", "--capsule", "sys")
    assert "give --load-state or --capsule, not both" in error


def test_smaller_files(tiny: Any, tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "float16"):
        out = tmp_path / dtype
        _done("prompt", tiny.path, "The", "-o", out, "--state-dtype", dtype)
        sizes[dtype] = out.stat().st_size
        saved = tmp_path / f"{dtype}.run"
        _done("run", tiny.path, "The", "--max-tokens", 0, "--save-state", saved,
              "--state-dtype", dtype)  # fmt: skip
        assert saved.stat().st_size == sizes[dtype]
        _done("run", tiny.path, "--load-state", out, *SETTINGS)
    assert "needs --save-state" in _failed("run", tiny.path, "The", "--state-dtype", "int8")
    assert sizes["float32"] - sizes["float16"] == pytest.approx(2 * 60, abs=16)  # of [6, 10]


def test_inspect_lists_them(bundle: Path) -> None:
    assert "capsule" not in _done("inspect", bundle).stdout
    _done("prompt", bundle, "The", "--name", "sys", "--default", "--state-dtype", "float16")
    _done("prompt", bundle, "Grüße aus", "--name", "other", "--variant", "model_q8")
    lines = [line.split() for line in _done("inspect", bundle).stdout.splitlines()]
    size = {n: c.record.bytes for n, c in Manifest.read(bundle).capsules.items()}
    length = len(edgelin.load(bundle).text.encode("Grüße aus"))
    assert ["capsule", "after", "tokens", "made", "by", "states", "bytes", "check"] in lines
    default = ["sys", "(default)", "1", "model", "float16", str(size["sys"]), "sha256", "right"]
    assert [*default[:2], *default[3:]] in [[*line[:2], *line[3:]] for line in lines]
    assert [
        "other", str(length), "model_q8", "float32", str(size["other"]), "sha256", "right",
    ] in lines  # fmt: skip
    found = json.loads(_done("inspect", bundle, "--json").stdout)
    assert found["default_capsule"] == "sys" and found["problems"] == []
    assert found["capsules"]["other"]["position"] == length


def test_inspect_finds_damage(bundle: Path) -> None:
    _done("prompt", bundle, "The", "--name", "sys")
    file = bundle / Manifest.read(bundle).capsules["sys"].file
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    result = _edgelin("inspect", bundle)
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if line.startswith("sys "))
    assert line.split() == ["sys", str(file.stat().st_size), "damaged"]
    assert "differs from its sha256 in the manifest; make the capsule again" in result.stderr
    _done("run", bundle, "The", *SETTINGS)  # what does not begin there is not disturbed
    assert "differs from its sha256" in _failed("run", bundle, "--capsule", "sys")
    _done("prompt", bundle, "--remove", "sys")
    _done("inspect", bundle)


def test_another_variant_is_warned_of(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    _done("prompt", bundle, "The", "--name", "sys", "--variant", "model_q8")
    _done("run", bundle, "--capsule", "sys", *SETTINGS)
    assert "was saved by variant model_q8 and goes on with model" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BUNDLE", "a", "-o", "no/s"], "cannot be written: there is no folder no"),
        (["BUNDLE", "a", "--name", "A"], "the capsule's name is 'A'"),
        (["BUNDLE", "a", "-o", "s", "--default"], "--default needs --name"),
        (["BUNDLE", "a", "-o", "s", "--state-dtype", "int4"], "allowed: float32, float16, int8"),
        (["BUNDLE", "", "-o", "s"], "the prompt is empty"),
        (["BUNDLE", "a", "-o", "s", "--variant", "x"], "no variant 'x'"),
        (["BUNDLE", "a", "-o", "s", "--chat"], "has no chat template"),
        (["BUNDLE", "--remove", "x"], "has no capsule 'x'; it has: none"),
        (["BUNDLE", "--file", "no", "-o", "s"], "cannot be read: No such file"),
        (["nowhere", "a", "-o", "s"], "nowhere is no bundle"),
        (["nowhere", "--remove", "x"], "nowhere cannot be changed: No such file"),
    ],
)
def test_errors(
    bundle: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    before = sorted(bundle.parent.rglob("*"))
    assert message in _failed("prompt", *[bundle if a == "BUNDLE" else a for a in arguments])
    assert sorted(bundle.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [[], ["a"], ["a", "--file", "-", "-o", "s"], ["a", "-o", "s", "--name", "x"], ["-o", "s"],
     ["a", "--remove", "x"]],
)  # fmt: skip
def test_wrong_usage(tiny: Any, arguments: list[str]) -> None:
    result = _edgelin("prompt", tiny.path, *arguments)
    assert result.exit_code == 2 and "Error: give " in result.stderr


def test_features(sensor: Any, tmp_path: Path) -> None:
    assert "reads features, not text" in _failed("prompt", sensor.path, "a", "-o", tmp_path / "s")


def test_needs_no_torch(bundle: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnx_ir']));"
        "from edgelin.cli import main; main(['prompt', sys.argv[1], 'The', '--name', 'sys'])"
    )
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
