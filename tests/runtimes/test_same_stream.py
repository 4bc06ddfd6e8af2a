"""One stream that wanders through all runners writes what an unbroken Python run writes.

A runner that is not built here is left out; ``make test-cpp``, ``test-jvm`` and ``test-web`` build
them, and CI does before it calls this file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgelin.runtimes import state_file
from edgelin.runtimes.session import Bundle

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "runtimes" / "golden"
PROMPT = "The quiet river runs past the old mill, naïve café: 日本語 🙂 and on"
TOKENS = 7  # a runner
CPP = ROOT / "build" / "cpp" / "edgelin-run"
NODE = ROOT / "runtimes" / "web" / "dist" / "cli.js"
JVM = ROOT / "build" / "jvm" / "classes"

Commands = Callable[[Path, str, str], list[str]]


def _common(load: str, save: str) -> list[str]:
    """Options that all command lines share."""
    return [
        "--max-tokens", str(TOKENS), "--temperature", "0", "--variant", "model", "--threads", "1",
        "--load-state", load, "--save-state", save,
    ]  # fmt: skip


# Name to what must be there, and the command that goes on from a state file and writes another.
RUNNERS: dict[str, tuple[Path, Commands]] = {
    "cpp": (CPP, lambda bundle, *files: [str(CPP), str(bundle), *_common(*files)]),
    "node": (NODE, lambda bundle, *files: ["node", str(NODE), str(bundle), *_common(*files)]),
    "jvm": (
        JVM,
        lambda bundle, *files: [
            str(ROOT / "runtimes/jvm/build.sh"), "RunKt", str(bundle), "", *_common(*files)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["fused", "hybrid", "growing", "complex"])
def test_wandering_stream_writes_what_an_unbroken_one_writes(name: str, tmp_path: Path) -> None:
    here = {key: command for key, (file, command) in RUNNERS.items() if file.exists()}
    if not here:
        pytest.skip("no other runner is built; see make test-cpp, test-jvm, test-web")
    bundle = Bundle(GOLDEN / name / "bundle", variant="model", threads=1)
    greedy = {"temperature": 0, "seed": 0}
    last = tmp_path / "0.state"
    stream = bundle.stream()
    list(stream.generate(PROMPT, max_tokens=TOKENS, **greedy))
    stream.save(last)
    list(stream.generate(max_tokens=TOKENS * (len(here) + 1), **greedy))  # never left Python

    for runner, command in here.items():
        before, last = last, tmp_path / f"{runner}.state"
        done = subprocess.run(
            command(bundle.path, str(before), str(last)), capture_output=True, text=True,
            env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{runner}: {done.stderr}"
        assert state_file.read(last).position == state_file.read(before).position + TOKENS, runner
    again = bundle.stream()
    again.load(last)
    list(again.generate(max_tokens=TOKENS, **greedy))

    one, two = stream.saved(), again.saved()
    assert one.position == two.position
    assert one.text is not None and two.text is not None
    assert one.text.recent == two.text.recent
    for key, wanted in one.tensors.items():
        np.testing.assert_allclose(two.tensors[key], wanted, rtol=1e-4, atol=1e-4, err_msg=key)
