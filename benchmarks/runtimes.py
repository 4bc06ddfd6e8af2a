"""Tokens a second of one bundle in every runner that is built here, in alternating rounds.

    make bench-runtimes          (make test-cpp test-jvm test-web build the others)

Every round starts every runner's own command line once, on one thread, and reads the speed that it
reports; the browser's is that of ``benchmarks/web/decode.mjs``. Prints the median and the best.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PROMPT, _IDS = "The old house stood at the end of the lane", "391 1150 923"
_TOKENS = 200


def commands(bundle: Path) -> dict[str, tuple[Path, list[str]]]:
    """By runner: what must be there, and its command line."""
    edgelin = Path(sys.executable).with_name("edgelin")
    node, cpp = ROOT / "runtimes/web/dist/cli.js", ROOT / "build/cpp/edgelin-run"
    jvm, web = ROOT / "runtimes/jvm/build.sh", ROOT / "benchmarks/web/decode.mjs"
    common = ["--max-tokens", str(_TOKENS), "--temperature", "0", "--threads", "1"]
    text, where = [_PROMPT, *common], str(bundle)
    return {
        "Python": (edgelin, [str(edgelin), "run", where, *text, "--stats"]),
        "Node": (node, ["node", str(node), where, *text, "--stats"]),
        "browser": (node, ["node", str(web), where, "--rounds", "4", "--browser-only"]),
        "C++": (cpp, [str(cpp), where, "--ids", _IDS, *common]),
        "JVM": (ROOT / "build/jvm/classes", [str(jvm), "RunKt", where, *text]),
    }


def speed(command: list[str]) -> float:
    """Tokens a second that a command line reports."""
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = re.findall(r"([0-9.]+) tokens/s", done.stdout + done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"{command[0]} failed: {done.stderr.strip()}")
    return float(found[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    found = commands(given.bundle)
    here = {name: command for name, (needed, command) in found.items() if needed.exists()}
    for name in found.keys() - here.keys():
        print(f"{name} is not built", file=sys.stderr)
    speeds: dict[str, list[float]] = {name: [] for name in here}
    for _ in range(given.rounds):
        for name, command in here.items():
            speeds[name].append(speed(command))
    print(f"{'tokens/s, one thread':22}median   best   ({given.rounds} rounds)")
    for name, all_of_it in speeds.items():
        print(f"{name:22}{statistics.median(all_of_it):6.0f} {max(all_of_it):6.0f}")


if __name__ == "__main__":
    main()
