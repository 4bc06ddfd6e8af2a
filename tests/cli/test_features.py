"""The commands with streams of features: a line a step, state files, data sets, wrong kinds."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgelin.cli import main

BLOCK = (
    "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnx_ir', 'onnxscript']));"
    "from edgelin.cli import main;"
)
LABELS = ("walk", "sit down", "läuft")


def _run(*arguments: Any, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def _failed(result: Result) -> str:
    """The one-line error of a command that failed."""
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def x() -> Any:
    return np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)


def _text(x: Any, separator: str = ",") -> str:
    """Steps as lines."""
    return "".join(separator.join(str(value) for value in row) + "\n" for row in x)


def test_a_line_for_every_step(sensor: Any, x: Any, tmp_path: Path) -> None:
    outputs, _ = sensor.reference(x)
    shares = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    wanted = "".join(f"{LABELS[row.argmax()]}\t{row.max():.4f}\n" for row in shares)
    np.save(tmp_path / "a.npy", x)
    np.save(tmp_path / "b.npy", x[None].astype(np.float64))
    for name in ("a.npy", "b.npy"):
        result = _run("run", sensor.path, "--features", tmp_path / name, "--threads", 1)
        assert (result.stdout, result.stderr) == (wanted, "")
    for stdin in (_text(x), _text(x, " "), _text(x, " ,\t")):
        assert _run("run", sensor.path, "--features", "-", stdin=stdin).stdout == wanted


def test_a_regression_prints_its_numbers(meter: Any, x: Any) -> None:
    result = _run("run", meter.path, "--features", "-", stdin=_text(x))
    found = np.loadtxt(io.StringIO(result.stdout))
    np.testing.assert_allclose(found, meter.reference(x)[0], rtol=1e-4, atol=1e-5)


def test_json_lines(sensor: Any, meter: Any, x: Any) -> None:
    lines = _run("run", sensor.path, "--features", "-", "--json", stdin=_text(x)).stdout
    found = [json.loads(line) for line in lines.splitlines()]
    assert [line["position"] for line in found] == list(range(1, 31))
    outputs, _ = sensor.reference(x)
    np.testing.assert_allclose([line["outputs"] for line in found], outputs, rtol=1e-4, atol=1e-5)
    assert [line["label"] for line in found] == [LABELS[i] for i in outputs.argmax(-1)]
    lines = _run("run", meter.path, "--features", "-", "--json", stdin=_text(x[:1])).stdout
    assert sorted(json.loads(lines)) == ["outputs", "position"]


def test_a_saved_stream_goes_on(sensor: Any, x: Any, tmp_path: Path) -> None:
    state, options = tmp_path / "s", ["--features", "-", "--json"]
    whole = _run("run", sensor.path, *options, stdin=_text(x)).stdout
    for cut in (1, 13, 29):
        first = _run("run", sensor.path, *options, "--save-state", state, stdin=_text(x[:cut]))
        second = _run("run", sensor.path, *options, "--load-state", state, stdin=_text(x[cut:]))
        assert first.stdout + second.stdout == whole


def test_a_wrong_line_keeps_what_was_read(sensor: Any, x: Any, tmp_path: Path) -> None:
    state, options = tmp_path / "s", ["--features", "-", "--json"]
    whole = _run("run", sensor.path, *options, stdin=_text(x)).stdout
    lines = _text(x[:13]) + "oops\n"
    first = _run("run", sensor.path, *options, "--save-state", state, stdin=lines)
    second = _run("run", sensor.path, *options, "--load-state", state, stdin=_text(x[13:]))
    assert first.exit_code == 1 and first.stdout + second.stdout == whole


def test_a_byte_order_mark_is_skipped(sensor: Any, x: Any) -> None:
    plain, marked = (
        _run("run", sensor.path, "--features", "-", stdin=mark + _text(x).encode()).stdout
        for mark in (b"", b"\xef\xbb\xbf")
    )
    assert plain == marked


def test_stats(sensor: Any, x: Any) -> None:
    result = _run("run", sensor.path, "--features", "-", "--stats", stdin=_text(x))
    lines = result.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["steps", "state", "memory", "variant"]
    assert lines[0].startswith("steps    30 steps, ") and "at position 30" in lines[1]


def test_nothing_in_nothing_out(sensor: Any, tmp_path: Path) -> None:
    state = tmp_path / "s"
    result = _run("run", sensor.path, "--features", "-", "--save-state", state, stdin="")
    assert (result.exit_code, result.output) == (0, "") and not state.exists()


def _process(*arguments: Any) -> Any:
    given = [str(argument) for argument in arguments]
    return subprocess.Popen(
        [sys.executable, "-c", f"{BLOCK} main({given!r})"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


def test_every_line_is_answered_before_the_next(sensor: Any, x: Any) -> None:
    wanted = _run("run", sensor.path, "--features", "-", stdin=_text(x)).stdout.splitlines()
    process = _process("run", sensor.path, "--features", "-", "--threads", 1)
    for row, line in zip(x[:5], wanted, strict=False):
        process.stdin.write(_text(row[None]).encode())
        process.stdin.flush()
        assert process.stdout.readline().decode().rstrip("\n") == line
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, b"", b"")


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT as a terminal does")
def test_ctrl_c_while_it_waits_saves_the_state(sensor: Any, x: Any, tmp_path: Path) -> None:
    state = tmp_path / "s"
    process = _process("run", sensor.path, "--features", "-", "--stats", "--save-state", state)
    process.stdin.write(_text(x[:4]).encode())
    process.stdin.flush()
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr.read().startswith(b"steps    4 steps")
    options = ["--features", "-", "--json"]
    again = _run("run", sensor.path, *options, "--load-state", state, stdin=_text(x[4:])).stdout
    whole = _run("run", sensor.path, *options, stdin=_text(x)).stdout
    assert again.splitlines() == whole.splitlines()[4:]
    process.communicate()


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("1,2,3,4,5\n1,2\n", "line 2 of standard input: 2 numbers, 5 are needed"),
        ("1,2,3,4,x\n", "line 1 of standard input: 'x' is no number; send lines of numbers alone"),
        ("1,2,3,4,nan\n", "line 1 of standard input: feature 4 at step 0 is nan"),
        (b"\xff\xfe\n", "standard input is no text"),
    ],
)
def test_wrong_lines(sensor: Any, stdin: Any, message: str) -> None:
    result = _run("run", sensor.path, "--features", "-", stdin=stdin)
    assert message in _failed(result)
    assert result.stdout.count("\n") == (stdin.count("\n") - 1 if isinstance(stdin, str) else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SENSOR", "a"], "reads features, not text; give it --features"),
        (["SENSOR", "--load-state", "STATE"], "reads features, not text; give it --features"),
        (["TINY", "--features", "-"], "reads text, not features; leave out --features"),
        (["TINY", "a", "--json"], "--json needs --features"),
        (["SENSOR", "a", "--features", "-"], "PROMPT is for text; leave it out with --features"),
        (["SENSOR", "--features", "-", "--file", "a"], "--file is for text"),
        (["SENSOR", "--features", "-", "--temperature", "0.8"], "--temperature is for text"),
        (["SENSOR", "--features", "-", "--stop", "a"], "--stop is for text"),
        (["SENSOR", "--features", "none.npy"], "none.npy: No such file"),
        (["SENSOR", "--features", "short.npy"], "short.npy: features have shape [3, 4]"),
        (["SENSOR", "--features", "set.npz"], "set.npz is no .npy file"),
        (["SENSOR", "--features", __file__], "is no readable .npy file"),
        (["SENSOR", "--features", ""], "cannot"),
    ],
)  # fmt: skip
def test_the_wrong_kind_is_refused(
    sensor: Any, tiny: Any, x: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.save("short.npy", x[:3, :4])
    np.savez("set.npz", x=x)
    _run("run", sensor.path, "--features", "-", "--save-state", "STATE", stdin=_text(x))
    names = {"SENSOR": str(sensor.path), "TINY": str(tiny.path)}
    result = _run("run", *(names.get(word, word) for word in arguments), stdin=_text(x))
    assert message in _failed(result)
    assert result.stdout == ""


def test_eval(sensor: Any, tiny: Any, x: Any, tmp_path: Path) -> None:
    best = sensor.reference(x)[0].argmax(-1)
    np.savez(
        tmp_path / "d.npz", x=x, lengths=np.array([30]), y=np.where(np.arange(30) < 6, -1, best)
    )
    options = ["--features", tmp_path / "d.npz"]
    result = _run("eval", sensor.path, *options)
    assert result.exit_code == 0, result.output
    assert "accuracy               1\n" in result.stdout and "answers                24\n" in (
        result.stdout
    )
    against = ["--against", sensor.path, "--against-variant", "model_q8", "--json"]
    found = json.loads(_run("eval", sensor.path, *options, *against).stdout)
    assert found["against_accuracy"] == 1 and found["kl_nat"] == 0 and found["agreement"] == 1
    both = [*options, "--text", tmp_path / "t"]
    for arguments, message in (
        ([sensor.path], "give either --text or --features"),
        ([sensor.path, *both], "give either --text or --features"),
        ([sensor.path, *options, "--max-tokens", 3], "--max-tokens is for text"),
        ([sensor.path, "--text", __file__], "reads features, not text; give it --features"),
        ([tiny.path, *options], "reads text, not features; leave out --features"),
    ):
        assert message in _failed(_run("eval", *arguments))


def test_inspect_shows_what_is_read_and_answered(sensor: Any, meter: Any, tiny: Any) -> None:
    for bundle, lines in (
        (sensor, ["input        features float32 [batch time 5], 5 numbers a step",
                  "output       outputs float32 [batch kept 3], classification of every step: "
                  "walk, sit down, läuft", "a call       1 .. 8 steps, 8 while reading many"]),
        (meter, ["output       outputs float32 [batch kept 2], regression of all that was read "
                 "so far"]),
        (tiny, ["input        input_ids int64 [batch time], 300 tokens in the vocabulary",
                "output       logits float32 [batch kept vocab]"]),
    ):  # fmt: skip
        result = _run("inspect", bundle.path)
        assert result.exit_code == 0, result.output
        assert set(lines) <= set(result.stdout.splitlines())
    found = json.loads(_run("inspect", sensor.path, "--json").stdout)
    assert found["input"]["feature_size"] == 5 and found["output"]["labels"] == list(LABELS)


def test_bench(sensor: Any, tmp_path: Path) -> None:
    result = _run("bench", sensor.path, "--tokens", 64, "--threads", 1, "--json", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("1 threads: decode ") and " steps/s, prefill " in result.stdout
    assert json.loads((tmp_path / "b").read_text())["speed"][0]["prefill_steps_per_s"] > 0
