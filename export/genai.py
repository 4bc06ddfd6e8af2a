"""``genai_config.json``: how onnxruntime-genai runs a bundle, where it can.

onnxruntime-genai knows decoders whose every layer keeps the tail of a convolution and a matrix
state, and binds them by the names that its configuration gives. So it runs a bundle of text whose
states are ``conv.i`` and ``recurrent.i`` of each layer and nothing else (Gated DeltaNet, DeltaNet,
Mamba-2, ...). It wants logits of every token of a call, and the graphs give the last ones, so that
it reads a prompt one token a call (``chunk_size``). Tried with onnxruntime-genai 0.18.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgelin.runtimes.manifest import Manifest

FILE_NAME = "genai_config.json"
_KINDS = ("conv", "recurrent")
# The states are of one size at any length; this only sizes a buffer of ids.
_LENGTH = 2**20


def write(folder: Path, manifest: Manifest) -> None:
    """Write the file into a bundle that onnxruntime-genai can run."""
    content = genai_config(manifest)
    if content is not None:
        text = json.dumps(content, indent=2) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")


def genai_config(manifest: Manifest) -> dict[str, Any] | None:
    """The configuration of a bundle's default variant, or None."""
    tokenizer = manifest.tokenizer
    shapes: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
    for spec in manifest.states:
        shapes.setdefault(spec.kind, []).append(spec.shape)
    layers = len(shapes["recurrent"])
    alike = all(len(found) == layers and len(set(found)) == 1 for found in shapes.values())
    if tokenizer is None or layers == 0 or not alike or shapes.keys() != {*_KINDS}:
        return None
    heads, head_size, _ = shapes["recurrent"][0]
    return {
        "model": {
            "type": "llama",  # a plain decoder
            "bos_token_id": tokenizer.eos_token_id,
            "eos_token_id": sorted(tokenizer.ends),
            "pad_token_id": tokenizer.eos_token_id,
            "context_length": _LENGTH,
            "vocab_size": manifest.output.size,
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": manifest.variant().file,
                "hidden_size": heads * head_size,
                "head_size": head_size,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": layers,
                "inputs": {
                    "input_ids": manifest.input.name,
                    **{f"past_{kind}_names": f"past_{kind}.%d" for kind in _KINDS},
                },
                "outputs": {
                    "logits": manifest.output.name,
                    **{f"present_{kind}_names": f"present_{kind}.%d" for kind in _KINDS},
                },
            },
        },
        "search": {"max_length": _LENGTH, "do_sample": False, "chunk_size": 1},
    }
