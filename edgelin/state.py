"""The one description of a recurrent state tensor.

Mixers declare their states as :class:`StateSpec`; the model, the exporter, the manifest and every
runtime derive names, shapes and initial values from it, so that no reader has to know a mechanism.

Kinds: ``recurrent`` (matrix state S), ``normalizer`` (z), ``recurrent_recent`` and
``normalizer_recent`` (their sums over the last tokens, where sums have two levels), ``max``
(running maximum of exponents), ``ssm`` / ``ssm_re`` / ``ssm_im`` (diagonal state), ``rnn`` (state
of a non-linear recurrence), ``conv`` (tail of a short convolution), ``shift`` / ``mlp_shift`` (the
last token that a mixer, or what follows it, read), ``key`` / ``value`` (cache of softmax attention:
the ring of a window, or all tokens), ``pool`` (running mean under a head for whole sequences),
``position`` (tokens seen; one a model).

Shapes are fixed, with one exception: the axis called ``"past"`` of the cache of an attention over
all tokens is 0 long at first and one longer after every token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROWING = "past"
_ITEM_BYTES = {"float32": 4, "int64": 8}
_ATTENTION_CACHE = ("key", "value")


@dataclass(frozen=True)
class StateSpec:
    """Name, shape and initial value of one state tensor.

    Args:
        kind: What the tensor holds (see the module docstring).
        layer: Index of the layer that owns it, or None for a state of the whole model.
        shape: Shape without the leading batch axis; batch is axis 0 of every state. One axis may be
            ``"past"``, which grows by one a token.
        layout: The axes in words, batch first, such as ``"batch heads key value"``.
        dtype: ``"float32"`` or ``"int64"``.
        initial: Constant that fills the tensor before the first token.
    """

    kind: str
    layer: int | None
    shape: tuple[int | str, ...]
    layout: str
    dtype: str = "float32"
    initial: float = 0.0

    @property
    def growing_axis(self) -> int | None:
        """Axis, batch counted, that is one longer after every token; None: none is."""
        return 1 + self.shape.index(GROWING) if GROWING in self.shape else None

    def sized(self, past: int = 0) -> tuple[int, ...]:
        """The shape, without batch, after so many tokens."""
        return tuple(size if isinstance(size, int) else past for size in self.shape)

    def num_bytes(self, past: int = 0) -> int:
        """Size for one stream after so many steps."""
        return math.prod(self.sized(past)) * _ITEM_BYTES[self.dtype]

    @property
    def bytes_per_step(self) -> int:
        """Bytes that every step adds for one stream; 0 for a state of fixed size."""
        return 0 if self.growing_axis is None else self.num_bytes(1)

    @property
    def name(self) -> str:
        """Key of the tensor in a state dictionary: ``kind.layer``, or ``kind`` of a model's own."""
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    @property
    def input_name(self) -> str:
        """Name of the graph input that takes the state."""
        if self.kind in _ATTENTION_CACHE:
            return f"past_key_values.{self.layer}.{self.kind}"
        return f"past_{self.name}"

    @property
    def output_name(self) -> str:
        """Name of the graph output that gives the state after the call."""
        if self.kind in _ATTENTION_CACHE:
            return f"present.{self.layer}.{self.kind}"
        return f"present_{self.name}"

    def as_dict(self) -> dict[str, Any]:
        """The entry of this state in the manifest ``edgelin.json``."""
        return {
            "name": self.name,
            "input": self.input_name,
            "output": self.output_name,
            "kind": self.kind,
            "layer": self.layer,
            "shape": ["batch", *self.shape],
            "layout": self.layout,
            "dtype": self.dtype,
            "initial": self.initial,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> StateSpec:
        """Read one entry of the manifest back."""
        return cls(
            kind=entry["kind"],
            layer=entry["layer"],
            shape=tuple(entry["shape"][1:]),
            layout=entry["layout"],
            dtype=entry["dtype"],
            initial=entry["initial"],
        )
