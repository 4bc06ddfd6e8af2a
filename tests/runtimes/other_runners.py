"""Command lines of the runners in other languages, as far as they are built here.

``make test-cpp``, ``test-jvm`` and ``test-web`` build them, and CI does before it runs what needs
them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "runtimes" / "golden"
CPP = ROOT / "build" / "cpp" / "edgelin-run"
NODE = ROOT / "runtimes" / "web" / "dist" / "cli.js"
JVM = ROOT / "build" / "jvm" / "classes"

TEXT_ONLY = ("node", "jvm")  # the C++ runner reads no tokenizer

Commands = Callable[[Path], list[str]]

# Name to what must be there, and the command that goes on where a stream of a bundle stands.
RUNNERS: dict[str, tuple[Path, Commands]] = {
    "cpp": (CPP, lambda bundle: [str(CPP), str(bundle)]),
    "node": (NODE, lambda bundle: ["node", str(NODE), str(bundle)]),
    "jvm": (JVM, lambda bundle: [str(ROOT / "runtimes/jvm/build.sh"), "RunKt", str(bundle), ""]),
}


def built() -> dict[str, Commands]:
    """The runners that are built here; skips the test if there is none."""
    here = {key: command for key, (file, command) in RUNNERS.items() if file.exists()}
    if not here:
        pytest.skip("no other runner is built; see make test-cpp, test-jvm, test-web")
    return here


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line with more environment variables, telemetry off."""
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1", **variables}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False
    )
