"""The contract of a bundle: its manifest, the same facts inside each graph, the model's hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from edgelin import tokenizer as tokenizers
from edgelin.checkpoint import CHAT_TEMPLATE, weight_files
from edgelin.errors import EdgelinError
from edgelin.export.profiles import Profile
from edgelin.families.reading import read_json
from edgelin.recurrences import CHUNK
from edgelin.runtimes.manifest import METADATA_KEY, Manifest
from edgelin.runtimes.signature import Features, Input, Output, Tokens
from edgelin.runtimes.tokenizer_record import TokenizerRecord

# Input of a graph whose calls may have rows of different lengths.
LENGTHS = "lengths"
# Variables of a chat template.
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

if TYPE_CHECKING:
    from edgelin.config import ModelConfig
    from edgelin.model import SequenceModel


def manifest(
    checkpoint: Path,
    model: SequenceModel,
    *,
    profile: Profile,
    min_onnxruntime: str,
    default_variant: str,
    lengths: bool = False,
) -> Manifest:
    """The manifest of a bundle, still without its files."""
    source, output = signature(model.config)
    return Manifest(
        model_hash=model_hash(checkpoint),
        input=source,
        output=output,
        states=model.state_specs(),
        tokenizer=_tokenizer(checkpoint) if isinstance(source, Tokens) else None,
        profile=profile.name,
        opset=profile.opset,
        min_onnxruntime=min_onnxruntime,
        default_variant=default_variant,
        variants={},
        max_time=profile.max_time,
        chunk=CHUNK,
        lengths=LENGTHS if lengths else None,
    )


def signature(config: ModelConfig) -> tuple[Input, Output]:
    """What the graphs of a model read and answer."""
    features = config.features
    if features is None:
        return Tokens(config.vocab_size), Output(config.vocab_size)
    return Features(features.size), Output(
        features.outputs, "outputs", features.head, features.task, features.labels
    )


def stamp(model: ir.Model, contract: Manifest) -> None:
    """Write the contract into the graph's metadata.

    Raises:
        ValueError: The graph's inputs and outputs are not those of the contract.
    """
    names = [contract.input.name, *(s.input_name for s in contract.states)]
    names += [name for name in (contract.lengths, contract.num_logits_to_keep) if name is not None]
    found = [value.name for value in model.graph.inputs]
    if found != names:
        raise ValueError(f"graph inputs are {found}, the contract says {names}")
    names = [contract.output.name, *(s.output_name for s in contract.states)]
    found = [value.name for value in model.graph.outputs]
    if found != names:
        raise ValueError(f"graph outputs are {found}, the contract says {names}")
    model.metadata_props[METADATA_KEY] = json.dumps(contract.io_part(), ensure_ascii=False)


def model_hash(checkpoint: Path) -> str:
    """sha256 over configuration and weights; the same for all variants of one model."""
    total = hashlib.sha256()
    for path in (checkpoint / "config.json", *weight_files(checkpoint)):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def _tokenizer(checkpoint: Path) -> TokenizerRecord:
    """File and special ids of the checkpoint's tokenizer, and how to talk to the model."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise EdgelinError(f"{checkpoint} has no tokenizer.json, which a bundle needs; add it")
    tokenizer = tokenizers.load(path)
    special = {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    ends = tokenizers.end_ids(checkpoint)
    names = _optional(checkpoint / "tokenizer_config.json")
    return TokenizerRecord(
        path.name,
        tokenizers.end_token_id(tokenizer, ends),
        special,
        tuple(ends),
        CHAT_TEMPLATE if (checkpoint / CHAT_TEMPLATE).is_file() else None,
        {role: name for role, name in names.items() if role in _ROLES and isinstance(name, str)},
    )


def _optional(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no file."""
    return read_json(path) if path.is_file() else {}
