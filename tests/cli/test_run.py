"""``edgelin run``: prompts, streams to stdout, state files, errors, and no torch."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgelin
from edgelin.cli import main
from edgelin.runtimes.manifest import Manifest, file_records

ROOT = Path(__file__).parents[2]
BLOCK = (
    "import sys; sys.modules.update(dict.fromkeys("
    "['torch', 'onnx', 'onnx_ir', 'onnxscript', 'triton', 'matplotlib']));"
    "from edgelin.cli import main;"
)


def _run(*arguments: Any, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)], input=stdin)


def _failed(result: Result) -> str:
    """The one-line error of a command that failed."""
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_prompt_from_argument_file_and_stdin(tiny: Any, tmp_path: Path) -> None:
    options = ["--max-tokens", 30, "--seed", 5, "--threads", 1]
    (tmp_path / "p.txt").write_text("Grüße aus", encoding="utf-8")
    first = _run(tiny.path, "Grüße aus", *options)
    assert first.exit_code == 0 and first.stdout and first.stderr == ""
    assert _run(tiny.path, "--file", tmp_path / "p.txt", *options).stdout == first.stdout
    assert _run(tiny.path, "--file", "-", *options, stdin="Grüße aus").stdout == first.stdout
    assert _run(tiny.path, *options, stdin="Grüße aus").stdout == first.stdout
    assert _run(tiny.path, "Grüße auf", *options).stdout != first.stdout


def test_saved_and_loaded_run_writes_the_same(tiny: Any, tmp_path: Path) -> None:
    state = tmp_path / "s.state"
    whole = _run(tiny.path, "The river", "--max-tokens", 40, "--seed", 5).stdout_bytes
    for cut in (0, 1, 13, 39):
        first = _run(
            tiny.path, "The river", "--max-tokens", cut, "--seed", 5, "--save-state", state
        )
        second = _run(tiny.path, "--load-state", state, "--max-tokens", 40 - cut, "--seed", 5)
        assert first.stdout_bytes + second.stdout_bytes == whole
        assert second.stderr == ""


def test_stats_go_to_stderr(tiny: Any) -> None:
    result = _run(tiny.path, "The", "--max-tokens", 3, "--seed", 5, "--stats", "--threads", 1)
    lines = [line.split()[0] for line in result.stderr.splitlines()]
    assert lines == ["prefill", "decode", "state", "memory", "variant", "seed"]
    assert "248 bytes at position" in result.stderr and "model, 1 threads" in result.stderr
    assert result.stdout == _run(tiny.path, "The", "--max-tokens", 3, "--seed", 5).stdout


def test_stop_string_is_not_printed(tiny: Any) -> None:
    options = ["--max-tokens", 60, "--seed", 5, "--temperature", 2, "--top-k", 0]
    whole = _run(tiny.path, "The", *options).stdout
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = _run(tiny.path, "The", *options, "--stop", "never seen", "--stop", stop).stdout
    assert cut == whole[: whole.index(stop)]


def test_errors(tiny: Any, tmp_path: Path) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"Gr" + b"\xfc\xdfe")
    assert "latin1.txt is not UTF-8: invalid byte 0xfc at offset 2" in _failed(
        _run(tiny.path, "--file", bad)
    )
    assert "standard input is not UTF-8" in _failed(_run(tiny.path, stdin=b"\xff"))
    assert "the prompt is empty" in _failed(_run(tiny.path, ""))
    assert "the prompt is empty" in _failed(_run(tiny.path, stdin=""))
    assert "cannot be read: No such file" in _failed(_run(tiny.path, "--file", tmp_path / "no"))
    assert "no bundle" in _failed(_run(tmp_path, "a"))
    assert "no state file" in _failed(_run(tiny.path, "--load-state", tmp_path / "no"))
    assert "no variant 'x'" in _failed(_run(tiny.path, "a", "--variant", "x"))
    assert "top_p is 3.0" in _failed(_run(tiny.path, "a", "--top-p", 3))
    assert "threads is 0" in _failed(_run(tiny.path, "a", "--threads", 0))
    assert "threads is 99999999999" in _failed(_run(tiny.path, "a", "--threads", 99999999999))
    assert "cannot be read: embedded null byte" in _failed(_run(tiny.path, "--file", "a\0b"))
    assert "the file name is empty" in _failed(_run(tiny.path, "--file", ""))
    assert "surrogate U+DCFF" in _failed(_run(tiny.path, "a\udcff"))


@pytest.mark.parametrize("name", ["no/s", "", ".", "pipe"])
def test_the_state_file_is_checked_before_the_model_runs(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    monkeypatch.setattr("edgelin.load", lambda *a, **k: pytest.fail("the model was loaded"))
    assert "cannot be written: " in _failed(_run(tiny.path, "a", "--save-state", name))


def _shell(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a bash script in which ``edgelin`` is the command."""
    edgelin = shlex.join([sys.executable, "-c", f"{BLOCK} main()"])
    script = f'set -o pipefail; edgelin() {{ {edgelin} "$@"; }}; {script}'
    command = ["bash", "-c", script, "bash", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell and /dev/full")
def test_a_broken_pipe_and_a_full_disk_keep_the_state(tiny: Any, tmp_path: Path) -> None:
    state = tmp_path / "s.state"
    run = 'edgelin run "$1" The --seed 5 --max-tokens 100000000 --stats --save-state "$2"'
    done = _shell(run + " | head -c 5 > /dev/null", tiny.path, state)
    assert done.returncode == 141, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()][-1] == "seed"
    assert "Traceback" not in done.stderr
    assert _run(tiny.path, "--load-state", state, "--max-tokens", 1).exit_code == 0
    state.unlink()
    done = _shell(run + " > /dev/full", tiny.path, state)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "Error: standard output cannot be written: No space left on device"
    )
    assert "Traceback" not in done.stderr and state.exists()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_closed_streams(tiny: Any) -> None:
    done = _shell('edgelin run "$1" --max-tokens 2 <&-', tiny.path)
    assert done.returncode == 1 and done.stderr.startswith("Error: the prompt is empty")
    done = _shell('edgelin run "$1" The --max-tokens 2 >&-', tiny.path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("Error: ")


@pytest.mark.parametrize("name", ["edgelin.json", "onnx/model.onnx", "onnx/model.onnx_data"])
def test_damaged_bundle(damaged: Path, name: str) -> None:
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    assert name in _failed(_run(damaged, "a"))
    (damaged / name).unlink()
    assert name in _failed(_run(damaged, "a"))


def test_wrong_usage(tiny: Any) -> None:
    both = _run(tiny.path, "a", "--file", "-")
    assert both.exit_code == 2 and "not both" in both.stderr
    assert _run(tiny.path, "a", "--max-tokens", "x").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [["run", "BUNDLE", "The", "--max-tokens", "3", "--stats"], ["inspect", "BUNDLE"],
     ["eval", "BUNDLE", "--text", "pyproject.toml", "--max-tokens", "9"],
     ["bench", "BUNDLE", "--tokens", "64"], ["--help"], ["run", "-h"]],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_without_torch(tiny: Any, arguments: list[str]) -> None:
    given = [str(tiny.path) if a == "BUNDLE" else a for a in arguments]
    done = subprocess.run(
        [sys.executable, "-c", f"{BLOCK} main({given!r})"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT as a terminal does")
def test_ctrl_c_saves_and_prints_statistics(tiny: Any, tmp_path: Path) -> None:
    state = tmp_path / "s.state"
    arguments = ["run", str(tiny.path), "The", "--max-tokens", str(10**9), "--seed", "5", "--stats",
                 "--save-state", str(state)]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", f"{BLOCK} main({arguments!r})"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        bufsize=0,  # communicate() would not see what a buffered read took beyond its 100 bytes
    )  # fmt: skip
    assert process.stdout is not None
    shown = process.stdout.read(100)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.decode().splitlines()[0].startswith("prefill")
    position = int(errors.decode().split("at position ")[1].split()[0])
    shown += rest
    again = _run(tiny.path, "--load-state", state, "--max-tokens", 5, "--seed", 5).stdout_bytes
    count = position - len(_encoded(tiny, "The")) + 5
    whole = _run(tiny.path, "The", "--max-tokens", count, "--seed", 5).stdout_bytes
    assert shown + again == whole


def _encoded(tiny: Any, text: str) -> list[int]:
    from edgelin.runtimes.text import TextCodec

    return TextCodec(tiny.path / "tokenizer.json", tiny.vocab_size).encode(text)


CHAT = """{% for m in messages %}<|end|>{{ m.role }}
{{ m.content }}
{% endfor %}<|end|>assistant
"""


@pytest.fixture
def talker(build: Any, tmp_path: Path) -> Path:
    """The tiny bundle with a chat template and settings of its authors."""
    folder = tmp_path / "talker"
    build(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    manifest = Manifest.read(folder)
    assert manifest.tokenizer is not None
    names = [*manifest.files, "chat_template.jinja", "generation_config.json"]
    record = dataclasses.replace(manifest.tokenizer, chat_template="chat_template.jinja")
    files = file_records(folder, names)
    dataclasses.replace(manifest, tokenizer=record, files=files).write(folder)
    return folder


def test_a_chat_in_one_turn_and_over_two_runs(talker: Path, tmp_path: Path) -> None:
    state, settings = tmp_path / "s.state", ["--chat", "--max-tokens", 12]
    stream = edgelin.load(talker).stream()
    first = _run(talker, "Hello", *settings, "--system", "S", "--save-state", state)
    assert first.stdout == "".join(stream.chat("Hello", system="S", max_tokens=12, temperature=0))
    second = _run(talker, *settings, "--load-state", state, stdin="And now?")
    assert second.stdout == "".join(stream.chat("And now?", max_tokens=12)) + stream.flush()
    warm = _run(talker, "Hello", *settings, "--temperature", 2, "--top-k", 0, "--seed", 1)
    assert warm.stdout != first.stdout


def test_a_dialogue_at_a_terminal(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgelin.cli.run._at_terminal", lambda: True)
    said = ["Hello", "  ", "And now?"]
    result = _run(talker, "--chat", "--max-tokens", 12, "--stats", stdin="\n".join(said) + "\n")
    assert result.exit_code == 0, result.output
    stream = edgelin.load(talker).stream()
    replies = []
    for text in ("Hello", "And now?"):
        replies += [*stream.chat(text, max_tokens=12), stream.flush()]
    assert result.stdout == "".join(replies)
    assert result.stderr.count("> ") == 4
    assert f"at position {stream.position}" in result.stderr
    assert "decode   24 tokens" in result.stderr


def test_a_system_text_as_a_capsule(talker: Path) -> None:
    settings = ["--max-tokens", "12", "--temperature", "0"]
    whole = _run(talker, "Hello", "--chat", "--system", "Be brief", *settings).stdout
    made = CliRunner().invoke(main, ["prompt", str(talker), "Be brief", "--chat", "--name", "s"])
    assert made.exit_code == 0, made.output
    assert _run(talker, "Hello", "--chat", "--capsule", "s", *settings).stdout == whole


def test_chat_errors(talker: Path, tiny: Any, sensor: Any) -> None:
    assert "has no chat template" in _failed(_run(tiny.path, "--chat", "a"))
    assert "--system needs --chat" in _failed(_run(talker, "a", "--system", "b"))
    assert "CHAT" in _failed(_run(sensor.path, "--features", "-", "--chat")).upper()
