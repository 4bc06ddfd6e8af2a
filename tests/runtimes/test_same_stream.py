"""One stream that wanders through all runners writes what an unbroken Python run writes.

A runner that is not built here is left out (:mod:`other_runners`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from other_runners import GOLDEN, TEXT_ONLY, Commands, built, run

from edgelin.runtimes import state_file
from edgelin.runtimes.session import Bundle

PROMPT = "The quiet river runs past the old mill, naïve café: 日本語 🙂 and on"
TOKENS = 7  # a runner


def _common(save: Path, load: Path | None, tokens: int = TOKENS, temperature: int = 0) -> list[str]:
    """Options that all command lines share."""
    begin = [] if load is None else ["--load-state", str(load)]
    return [
        "--max-tokens", str(tokens), "--temperature", str(temperature), "--variant", "model",
        "--threads", "1", "--save-state", str(save), *begin,
    ]  # fmt: skip


def _go_on(command: Commands, bundle: Path, save: Path, load: Path | None = None) -> None:
    """Write ``TOKENS`` tokens in another runner."""
    done = run([*command(bundle), *_common(save, load)])
    assert done.returncode == 0, done.stderr


def _alike(one: state_file.SavedStream, two: state_file.SavedStream) -> None:
    """Same tokens and text, and states within rounding."""
    assert one.position == two.position
    assert one.text == two.text
    for key, wanted in one.tensors.items():
        np.testing.assert_allclose(two.tensors[key], wanted, rtol=1e-4, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["fused", "hybrid", "growing", "complex"])
def test_wandering_stream_writes_what_an_unbroken_one_writes(name: str, tmp_path: Path) -> None:
    here = built()
    bundle = Bundle(GOLDEN / name / "bundle", variant="model", threads=1)
    greedy = {"temperature": 0, "seed": 0}
    last = tmp_path / "0.state"
    stream = bundle.stream()
    list(stream.generate(PROMPT, max_tokens=TOKENS, **greedy))
    stream.flush()  # the C++ runner, which knows no text, would keep what is held back
    stream.save(last)
    list(stream.generate(max_tokens=TOKENS * (len(here) + 1), **greedy))  # never left Python

    for runner, command in here.items():
        before, last = last, tmp_path / f"{runner}.state"
        _go_on(command, bundle.path, last, before)
        assert state_file.read(last).position == state_file.read(before).position + TOKENS, runner
    again = bundle.stream()
    again.load(last)
    list(again.generate(max_tokens=TOKENS, **greedy))
    stream.flush()
    again.flush()
    _alike(stream.saved(), again.saved())


def test_a_text_ends_alike_where_a_character_is_incomplete(tmp_path: Path) -> None:
    """U+FFFD ends what is printed; the state keeps the bytes, which the next call may complete."""
    bundle = Bundle(GOLDEN / "fused" / "bundle", variant="model", threads=1)
    for seed in range(100):
        stream = bundle.stream()
        stream.load(GOLDEN / "fused" / "model.state")
        written = "".join(stream.generate(max_tokens=4, temperature=2, seed=seed))
        kept = stream.saved()
        if rest := stream.flush():
            break
    assert rest == "\N{REPLACEMENT CHARACTER}"
    for name in built().keys() & set(TEXT_ONLY):
        path = tmp_path / f"{name}.state"
        options = _common(path, GOLDEN / "fused" / "model.state", tokens=4, temperature=2)
        done = run([*built()[name](bundle.path), *options, "--seed", str(seed)])
        assert (done.returncode, done.stdout) == (0, f"{written}{rest}\n"), name
        _alike(kept, state_file.read(path))


def test_a_prompt_is_read_alike_in_a_locale_without_unicode(tmp_path: Path) -> None:
    bundle = Bundle(GOLDEN / "fused" / "bundle", variant="model", threads=1)
    stream = bundle.stream()
    text = "".join(stream.generate(PROMPT, max_tokens=TOKENS, temperature=0, seed=0))
    kept, text = stream.saved(), text + stream.flush()
    for name in built().keys() & set(TEXT_ONLY):
        path = tmp_path / f"café-{name}.state"
        begin = [word for word in built()[name](bundle.path) if word]
        done = run([*begin, PROMPT, *_common(path, None)], LC_ALL="C")
        assert (done.returncode, done.stdout) == (0, f"{text}\n"), name
        _alike(kept, state_file.read(path))


def test_streams_begin_in_the_default_capsule_everywhere(tmp_path: Path) -> None:
    here, folder = built(), tmp_path / "bundle"
    shutil.copytree(GOLDEN / "fused" / "bundle", folder)
    bundle = Bundle(folder, variant="model", threads=1)
    first = bundle.stream()
    first.feed(bundle.text.encode(PROMPT))
    bundle.add_capsule("mill", first, default=True)
    stream = bundle.stream()
    list(stream.generate(max_tokens=TOKENS, temperature=0, seed=0))
    stream.flush()
    for runner, command in here.items():
        _go_on(command, folder, tmp_path / f"{runner}.state")
        found = bundle.stream()
        found.load(tmp_path / f"{runner}.state")
        found.flush()
        _alike(stream.saved(), found.saved())
