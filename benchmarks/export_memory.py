"""Peak memory and time of ``edgelin export`` on a random model of another project's class.

The allowance is 1.3 times the bytes of the weights as the bundle stores them, and 1 GB: the weights
once, as a session packs them, and what Python, torch and onnx take without any model. The peak is
the export process's own, as the system counts it (pages of mapped files too); the process that
measures the bundle's speed comes after it and is smaller.

    python benchmarks/export_memory.py mamba2-130m mamba2-370m --quantize none int8 int4

A model is one of MODELS, ``NAME`` or ``NAME@LAYERS`` for another depth. Needs transformers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# Name to the configuration's class and sizes, those of the published checkpoints.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-130m": (
        "Mamba2Config",
        {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64,
         "state_size": 128, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True},
    ),
    "mamba2-370m": (
        "Mamba2Config",
        {"hidden_size": 1024, "num_hidden_layers": 48, "num_heads": 32, "head_dim": 64,
         "state_size": 128, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True},
    ),
    "lfm2-350m": (
        "Lfm2Config",
        {"hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 65536,
         "block_auto_adjust_ff_dim": True,
         "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv"
                         for i in range(16)]},
    ),
    "qwen3.5-0.8b": (
        "Qwen3_5TextConfig",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
         "linear_num_key_heads": 16, "linear_num_value_heads": 16, "vocab_size": 248320,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
ALLOWED_SHARE, ALLOWED_BYTES = 1.3, 1e9
_BUILD = """
import json, sys, torch, transformers
kind, sizes, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
config = getattr(transformers, kind)(**sizes)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
"""


@dataclass(frozen=True)
class Found:
    """One export.

    Args:
        model: Name.
        parameters: Of the model.
        quantize: The variant.
        stored: Bytes of its weights in the bundle.
        peak: Largest resident set of the export process.
        seconds: Wall clock.
        processor_seconds: Of all cores.
    """

    model: str
    parameters: int
    quantize: str
    stored: int
    peak: int
    seconds: float
    processor_seconds: float

    @property
    def allowed(self) -> float:
        """Bytes that the peak may reach."""
        return ALLOWED_SHARE * self.stored + ALLOWED_BYTES

    def row(self) -> str:
        """A line of the table."""
        cells = (
            self.model,
            f"{self.parameters / 1e6:.0f} M",
            self.quantize,
            f"{self.stored / 1e6:,.0f}",
            f"{self.peak / 1e6:,.0f}",
            f"{self.allowed / 1e6:,.0f}",
            f"{self.seconds:.0f}",
            f"{self.processor_seconds:.0f}",
        )
        return f"| {' | '.join(cells)} |"


HEADER = """| model | parameters | weights | MB stored | peak MB | allowed MB | s | processor s |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Build, export, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--quantize", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--work", type=Path, help="folder for checkpoints and bundles, kept")
    options = parser.parse_args()
    if unknown := {name.partition("@")[0] for name in options.models} - set(MODELS):
        parser.error(f"{min(unknown)} is unknown; allowed: {', '.join(MODELS)}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.system()} {platform.machine()}, {cores} cores, {datetime.date.today()}\n")
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for name in options.models:
            checkpoint = work / name
            if not checkpoint.exists():
                build(name, checkpoint)
            for quantize in options.quantize:
                print(export(name, checkpoint, quantize, work / "bundle").row(), flush=True)


def build(name: str, folder: Path) -> None:
    """Write a random checkpoint, in a process of its own."""
    base, _, layers = name.partition("@")
    kind, sizes = MODELS[base]
    if layers:
        sizes = sizes | {"num_hidden_layers": int(layers)}
        if "layer_types" in sizes:
            sizes["layer_types"] = sizes["layer_types"][: int(layers)]
    command = [sys.executable, "-c", _BUILD, kind, json.dumps(sizes), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    write_tokenizer(folder / "tokenizer.json")


def write_tokenizer(path: Path) -> None:
    """A tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(["<|end|>", *alphabet])}, []))
    made.add_special_tokens(["<|end|>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path))


def export(name: str, checkpoint: Path, quantize: str, out: Path) -> Found:
    """Export in a process of its own and watch it.

    Raises:
        SystemExit: The export failed.
    """
    code = "from edgelin.cli import main; main()"
    command = [sys.executable, "-c", code, "export", str(checkpoint), "-o", str(out), "--force"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--quantize", quantize], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = Peak(process.pid)
    _, stderr = process.communicate()
    seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(stderr.decode())
    report = json.loads((out / "report.json").read_text())
    data = sum(path.stat().st_size for path in (out / "onnx").iterdir())
    return Found(
        name, report["parameters"], quantize, data, peak.bytes, seconds, peak.processor_seconds
    )


class Peak:
    """Watches a process: its largest resident set, as the system keeps it, and processor time."""

    def __init__(self, pid: int) -> None:
        self.bytes, self.processor_seconds = 0, 0.0
        self._process = psutil.Process(pid)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        try:
            while True:
                text = status.read_text() if status.exists() else ""
                kept = text.partition("VmHWM:")[2].split()[:1]  # Linux keeps the largest
                now = int(kept[0]) * 1024 if kept else self._process.memory_info().rss
                times = self._process.cpu_times()
                self.bytes = max(self.bytes, now)
                self.processor_seconds = times.user + times.system
                time.sleep(0.02)
        except (psutil.Error, OSError):
            return


if __name__ == "__main__":
    main()
