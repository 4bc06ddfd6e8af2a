"""The same models in PyTorch: eager steps of ours, and ``generate()`` of transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version

import models
import torch

from edgelin.model import SequenceModel


def versions() -> dict[str, str]:
    """Of what is compared with."""
    return {name: version(name) for name in ("torch", "transformers")}


def eager(name: str, threads: int) -> Callable[[], object]:
    """A function that makes one step of a model of ours in PyTorch.

    Args:
        name: One of ``models.CONFIGS``.
        threads: Of PyTorch.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = SequenceModel(models.CONFIGS[name]).eval()
    token = torch.tensor([[1]])
    state = model.initial_state(1)

    def step() -> object:
        nonlocal state
        with torch.inference_mode():
            logits, state = model(token, state)
        return logits

    return step


def generate(name: str, threads: int) -> Callable[[int], float]:
    """A function that generates tokens with transformers and returns tokens a second.

    The first token, which comes with reading the prompt, is not counted.

    Args:
        name: One of ``models.PUBLISHED``.
        threads: Of PyTorch.
    """
    torch.set_num_threads(threads)
    model = models.published(name)
    prompt = torch.tensor([[1, 2, 3, 4]])

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - begin

    seconds(2)
    return lambda count: count / (seconds(1 + count) - seconds(1))
