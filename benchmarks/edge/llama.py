"""llama.cpp with a model of the same sizes: a GGUF file of random weights, and llama-bench.

llama.cpp reads Gated DeltaNet as ``qwen35``. It refuses a model without any layer of attention, so
the last of the 24 layers is one, with fewer weights than the layer that it replaces. Every matrix
is quantised, the embedding and the head too (``llama-quantize --pure``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import numpy as np
from numpy.typing import NDArray

from edgelin.files import replacing

KINDS = {4: "Q4_0", 8: "Q8_0"}
_HEAD, _HEADS, _KV_HEADS = 128, 8, 2  # of the layer of attention
_Tensors = Iterator[tuple[str, NDArray[np.float32]]]


class Llama:
    """A built source tree of llama.cpp and the GGUF files made for it.

    Args:
        source: Folder with ``build/bin/llama-bench`` and ``gguf-py``.
        folder: Where GGUF files are kept.

    Raises:
        FileNotFoundError: It is not built.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._program = source / "build" / "bin" / "llama-bench"
        if not self._program.is_file():
            raise FileNotFoundError(
                f"{self._program} is missing; build llama.cpp as README.md says"
            )

    def tokens_per_s(self, bits: int, threads: int, *, prompt: int = 0, steps: int = 0) -> float:
        """Speed of one run of llama-bench: of reading a prompt, or of single steps.

        Args:
            bits: 4 or 8.
            threads: Its ``-t``.
            prompt: Tokens to read, without ``steps``.
            steps: Tokens to generate, without ``prompt``.
        """
        found = self._run(bits, "-t", str(threads), "-p", str(prompt), "-n", str(steps))
        return float(found["avg_ts"])

    def version(self) -> str:
        """Build number and commit, or what the source tells."""
        found = self._run(4, "-p", "1", "-n", "0")
        return f"{found['build_number']} ({found['build_commit']})"

    def _run(self, bits: int, *options: str) -> dict[str, Any]:
        """The only line of one run of llama-bench."""
        command = [str(self._program), "-m", str(self.model(bits)), "-r", "1", "-o", "json"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        (found,) = json.loads(done.stdout)
        return dict(found)

    def model(self, bits: int) -> Path:
        """The GGUF file, written on first use."""
        path = self._folder / f"gated-delta-{KINDS[bits]}.gguf"
        if not path.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            print(f"writing {path}", file=sys.stderr, flush=True)
            with replacing(path) as part:
                self._write(part, KINDS[bits])
        return path

    def _write(self, path: Path, kind: str) -> None:
        """A GGUF file of this quantisation."""
        sys.path.insert(0, str(self._source / "gguf-py"))
        import gguf

        stored = gguf.GGMLQuantizationType[kind]
        writer = gguf.GGUFWriter(path, "qwen35")
        _describe(writer, gguf)
        for name, array in _tensors():
            if array.ndim == 2 and "conv1d" not in name:
                writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _sizes() -> dict[str, int]:
    """Sizes of our model ``gated-delta``."""
    config = models.CONFIGS["gated-delta"]
    mixer = config.mixers["mix"]
    return {
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "vocab": config.vocab_size,
        "layers": len(config.layers),
        "heads": mixer["num_heads"],
        "key_heads": mixer["num_key_heads"],
        "head": mixer["value_dim"],
    }


def _describe(writer: Any, gguf: Any) -> None:
    """The header: sizes, and a vocabulary of made-up words."""
    s = _sizes()
    writer.add_block_count(s["layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(s["width"])
    writer.add_feed_forward_length(s["inner"])
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(_HEAD // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_rope_freq_base(1e6)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(s["heads"] * s["head"])
    writer.add_ssm_state_size(s["head"])
    writer.add_ssm_time_step_rank(s["heads"])
    writer.add_ssm_group_count(s["key_heads"])
    writer.add_full_attention_interval(s["layers"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"w{i}" for i in range(s["vocab"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * s["vocab"])
    writer.add_token_merges(["w 0"])
    writer.add_eos_token_id(0)


def _tensors() -> _Tensors:
    """Names and random content, rows first."""
    s, random = _sizes(), np.random.default_rng(0)

    def drawn(*shape: int) -> NDArray[np.float32]:
        return 0.02 * random.standard_normal(shape, np.float32)

    width, ones = s["width"], np.ones
    yield "token_embd.weight", drawn(s["vocab"], width)
    yield "output_norm.weight", ones(width, np.float32)
    yield "output.weight", drawn(s["vocab"], width)
    for layer in range(s["layers"]):
        start = f"blk.{layer}."
        yield f"{start}attn_norm.weight", ones(width, np.float32)
        yield f"{start}post_attention_norm.weight", ones(width, np.float32)
        attends = layer == s["layers"] - 1
        for name, array in _attention(s, drawn) if attends else _gated_delta(s, drawn):
            yield f"{start}{name}", array
        yield f"{start}ffn_gate.weight", drawn(s["inner"], width)
        yield f"{start}ffn_up.weight", drawn(s["inner"], width)
        yield f"{start}ffn_down.weight", drawn(width, s["inner"])


def _gated_delta(s: dict[str, int], drawn: Any) -> _Tensors:
    """One layer of Gated DeltaNet."""
    values, keys = s["heads"] * s["head"], s["key_heads"] * s["head"]
    channels = 2 * keys + values
    yield "attn_qkv.weight", drawn(channels, s["width"])
    yield "attn_gate.weight", drawn(values, s["width"])
    yield "ssm_conv1d.weight", drawn(channels, 4)
    yield "ssm_dt.bias", drawn(s["heads"])
    yield "ssm_a", -np.ones(s["heads"], np.float32)
    yield "ssm_beta.weight", drawn(s["heads"], s["width"])
    yield "ssm_alpha.weight", drawn(s["heads"], s["width"])
    yield "ssm_norm.weight", np.ones(s["head"], np.float32)
    yield "ssm_out.weight", drawn(s["width"], values)


def _attention(s: dict[str, int], drawn: Any) -> _Tensors:
    """The one layer of attention."""
    yield "attn_q.weight", drawn(2 * _HEADS * _HEAD, s["width"])
    yield "attn_k.weight", drawn(_KV_HEADS * _HEAD, s["width"])
    yield "attn_v.weight", drawn(_KV_HEADS * _HEAD, s["width"])
    yield "attn_q_norm.weight", np.ones(_HEAD, np.float32)
    yield "attn_k_norm.weight", np.ones(_HEAD, np.float32)
    yield "attn_output.weight", drawn(s["width"], _HEADS * _HEAD)
