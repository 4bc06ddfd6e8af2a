"""What a user should know of a bundle before using it, each a line or none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from edgelin.experts import Experts
from edgelin.runtimes import chat
from edgelin.runtimes.tokenizer_record import TokenizerRecord


def template(folder: Path, tokenizer: TokenizerRecord | None) -> list[str]:
    """Whether the chat template of a bundle is broken, which only a dialogue would find."""
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    why = chat.fault(folder / tokenizer.chat_template, tokenizer.chat_tokens)
    if why is None:
        return []
    return [
        f"warning: {tokenizer.chat_template} cannot be rendered ({why}), so that `edgelin run "
        f"--chat` will refuse; correct the checkpoint's, or use plain prompts"
    ]


def float_experts(key: str, model: nn.Module, rounded: Iterable[str]) -> list[str]:
    """Whether a quantised variant keeps experts in float and is larger than a user expects.

    Args:
        key: The variant.
        model: The model.
        rounded: Names of the parameters that are rounded.
    """
    every = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    known = {name.rpartition(".")[0] for name in rounded}
    left = [name for name in every if name not in known]
    if not left:
        return []
    return [
        f"{key}: {len(left)} of {len(every)} layers keep float experts, such as {left[0]}: a role "
        f"says so, or their rows are no multiple of the 32 weights of a kernel's block"
    ]
