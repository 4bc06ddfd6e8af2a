"""What the manifest says of a bundle's tokenizer: ids that a runner must know, and how to talk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer file and what a runner must know besides.

    Args:
        file: Path of ``tokenizer.json``, relative to the bundle.
        eos_token_id: Id that ends a document.
        special_tokens: Special token text to id.
        eos_token_ids: Ids that end a generation, ``eos_token_id`` among them; empty: it alone.
        chat_template: Path of the Jinja template of a dialogue; None: the model has none.
        chat_tokens: Variables of the template, such as ``bos_token``.
    """

    file: str
    eos_token_id: int
    special_tokens: dict[str, int]
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    chat_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset((self.eos_token_id, *self.eos_token_ids))

    @property
    def largest_id(self) -> int:
        """The largest id that is named here."""
        return max(*self.ends, *self.special_tokens.values(), 0)

    @property
    def files(self) -> list[str]:
        """The files that must be in the bundle."""
        return [self.file, *([] if self.chat_template is None else [self.chat_template])]

    def as_dict(self) -> dict[str, Any]:
        """The object in the manifest."""
        return {
            "file": self.file,
            "eos_token_id": self.eos_token_id,
            "eos_token_ids": sorted(self.ends),
            "special_tokens": self.special_tokens,
            "chat_template": self.chat_template,
            "chat_tokens": self.chat_tokens,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TokenizerRecord:
        """Read such an object, whose types were checked; of older bundles keys are missing."""
        return cls(
            content["file"],
            content["eos_token_id"],
            dict(content["special_tokens"]),
            tuple(content.get("eos_token_ids", ())),
            content.get("chat_template"),
            dict(content.get("chat_tokens", {})),
        )


__all__ = ["TokenizerRecord"]
