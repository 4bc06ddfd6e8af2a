"""The other side of every claim about a family: the model class that published it.

A test builds a tiny random model with transformers' own class, every parameter off its neutral
value, saves it as its users do, and compares what we make of the folder with its logits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from edgelin import catalogue, families
from edgelin import checkpoint as checkpoints
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.step_form import step_form
from edgelin.export.trace import trace
from edgelin.families.convert import convert, read_json
from edgelin.families.reading import Tensors
from edgelin.model import SequenceModel
from edgelin.model_config import ModelConfig

VOCABULARY = 120
LENGTHS = (1, 63, 64, 65, 150)
PIECES = (1, 63, 64, 1, 20, 1)  # 150 tokens


def randomise(model: Any, *, scale: float = 1.0, seed: int = 0) -> Any:
    """Move every parameter off its initial value; matrices keep activations of about one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2 and "conv" not in name and "A_log" not in name:
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.2 * noise)
    return model.eval()


def rounded(model: Any, dtype: torch.dtype) -> Any:
    """Round the weights to a type and compute in float32; rotary buffers stay as they are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def save(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the folder that a user would have, with a small tokenizer."""
    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    tokenizer(folder)
    return folder


def tokenizer(folder: Path) -> None:
    """Write a small tokenizer."""
    words = {"<|end|>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))


def rewrite(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of the config and take others away."""
    path = folder / "config.json"
    values = read_json(path) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in without}))


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put more tensors into the weights of a folder, or others in the place of its own."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


def ids(batch: int, time: int) -> Tensor:
    """Random tokens."""
    generator = torch.Generator().manual_seed(time)
    return torch.randint(1, VOCABULARY, (batch, time), generator=generator)


@torch.no_grad()
def check_torch(model: Any, folder: Path, tolerance: float = 1e-4) -> SequenceModel:
    """Convert and compare full passes, pieces and single tokens with the oracle's full pass."""
    own = folder.with_name(f"{folder.name}-own")
    convert(folder, own)
    ours, config = checkpoints.load(own)
    check_catalogue(folder, config)
    for batch, time in [(1, 1), (3, 63), (1, 64), (3, 65), (3, 150)]:
        tokens = ids(batch, time)
        near(ours(tokens)[0], full(model, tokens), tolerance, f"full pass of {time}")
    tokens = ids(3, 150)
    wanted = full(model, tokens)
    for cuts in (PIECES, (70, 80), (100, *[1] * 50)):
        logits, state = [], ours.initial_state(3)
        for piece in tokens.split(list(cuts), dim=1):
            part, state = ours(piece, state)
            logits.append(part)
        near(torch.cat(logits, 1), wanted, tolerance, f"pieces {cuts[:4]}")
    return ours


def check_logits(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """:func:`check_torch` of a checkpoint in this type; in float32 :func:`check_graphs` too."""
    theirs = rounded(model, dtype)
    ours = check_torch(theirs, save(theirs, folder, dtype))
    if dtype == torch.float32:
        check_graphs(theirs, ours)


def check_catalogue(folder: Path, config: ModelConfig) -> None:
    """The layers are among those that `edgelin families` names for the family."""
    path = folder / "config.json"  # which a .pth file has not
    values = read_json(path) if path.is_file() else families.describe(Tensors(folder))
    module = families.find(values, str(folder)).__name__
    said = next(f for f in catalogue.families() if module.endswith(f".{f.name}"))
    for table in config.mixers.values():
        assert {part["type"] for part in (table, *table.get("parts", ()))} <= set(said.mixers)


@torch.no_grad()
def check_graphs(model: Any, ours: SequenceModel, tolerance: float = 1e-4) -> None:
    """Compare exported graphs, fed in pieces and token by token, with the oracle's full pass."""
    tokens = ids(3, 150)
    wanted = full(model, tokens)
    stepped = step_form(ours)
    traced = trace(stepped)
    for profile in ("fused", "plain"):
        graph = traced.clone()
        passes.lower(graph, PROFILES[profile])
        passes.finish(graph, PROFILES[profile])
        for cuts in (PIECES, (64, 64, *[1] * 22)):
            got = torch.cat(list(_run(graph, stepped, tokens, cuts)), dim=1)
            near(got, wanted, tolerance, f"{profile} graph, pieces {cuts[:3]}")


def _run(graph: Any, model: SequenceModel, tokens: Tensor, cuts: Any) -> Iterator[Tensor]:
    """Logits of every piece."""
    from export_models import session

    runner, specs = session(graph), model.state_specs()
    state = {s.name: t.numpy() for s, t in zip(specs, model.initial_state(3).values(), strict=True)}
    for piece in tokens.split(list(cuts), dim=1):
        feeds = {s.input_name: state[s.name] for s in specs}
        feeds |= {"input_ids": piece.numpy(), "num_logits_to_keep": np.array(0)}
        logits, *after = runner.run(None, feeds)
        state = {spec.name: array for spec, array in zip(specs, after, strict=True)}
        yield torch.from_numpy(logits)


def full(model: Any, tokens: Tensor) -> Tensor:
    """The oracle's logits of one pass over everything."""
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def near(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Absolute difference of logits, which have a spread of about one."""
    assert got.shape == wanted.shape, what
    assert wanted.std() > 0.3, f"{what}: the logits say nothing"
    error = float((got.double() - wanted.double()).abs().max())
    assert error < tolerance, f"{what}: {error:.1e}"
