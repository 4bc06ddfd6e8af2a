"""Two tasks that need a memory: associative recall with many queries, and copying.

Both are drawn anew for every batch; targets are -1 where nothing is asked.

- ``mqar`` (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 4): n pairs of key and value,
  then every key again in random order, each to be answered with its value.
- ``copy`` (Jelassi et al. 2024, "Repeat After Me", arXiv:2402.01032, section 2): n random letters,
  a separator, then the same letters again.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH = 256
SIZES = {"mqar": (4, 8, 16, 32, 64), "copy": (8, 16, 32, 64, 127)}  # n: how much is to be held
_KEYS = 128  # keys are 2 .. 129, values 130 .. 257
_LETTERS = 64
_PAD, _SEPARATOR = 0, 1
VOCABULARY = 2 + 2 * _KEYS


def draw(task: str, size: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each ``[rows, LENGTH]`` int64 on the generator's device."""
    tokens, targets = {"mqar": _mqar, "copy": _copy}[task](size, rows, generator)
    missing = (0, LENGTH - tokens.shape[1])
    pad = torch.nn.functional.pad
    return pad(tokens, missing, value=_PAD), pad(targets, missing, value=-1)


def _mqar(size: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs, then queries; the answer is asked at the key's place and given after it."""
    keys = _permutation(rows, _KEYS, generator)[:, :size] + 2
    values = torch.randint(_KEYS, keys.shape, generator=generator, device=generator.device)
    values = values + 2 + _KEYS
    order = _permutation(rows, size, generator)
    asked, answers = keys.gather(1, order), values.gather(1, order)
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    queries = torch.stack([asked, answers], dim=2).flatten(1)
    wanted = torch.stack([answers, torch.full_like(answers, -1)], dim=2).flatten(1)
    return torch.cat([pairs, queries], dim=1), torch.cat([torch.full_like(pairs, -1), wanted], 1)


def _copy(size: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Letters, separator, letters; each letter of the copy is asked at the place before it."""
    letters = 2 + torch.randint(
        _LETTERS, (rows, size), generator=generator, device=generator.device
    )
    separator = torch.full_like(letters[:, :1], _SEPARATOR)
    tokens = torch.cat([letters, separator, letters], dim=1)
    targets = torch.cat([torch.full_like(letters, -1), letters, torch.full_like(separator, -1)], 1)
    return tokens, targets


def _permutation(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """A permutation a row."""
    noise = torch.rand(rows, size, generator=generator, device=generator.device)
    return noise.argsort(dim=1)
