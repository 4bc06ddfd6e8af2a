"""How a variant stores its matrices: bits by the role of a tensor.

| role | tensors | unless told |
| --- | --- | --- |
| ``embedding`` | token embedding | int8 |
| ``head`` | output head; one matrix with the embedding where they are tied | the variant's bits |
| ``mixer`` | projections into and out of a mixer | the variant's bits, in int4 int8 |
| ``mlp`` | matrices of an MLP | the variant's bits |
| ``experts`` | matrices of experts | the variant's bits |
| ``gates`` | projections that make beta, decay or dt, whose errors add up in a state | float |
| ``router`` | chooses experts | float |

Convolutions, norms, vectors such as A_log and dt_bias, and states are float always: the kernels
know nothing else, and they are small.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError

FLOAT = 32
ALWAYS_FLOAT = ("conv", "norm", "decay", "state")
METHODS = ("nearest", "gptq")
_LEAST_BLOCK = 32
# A model of fewer channels shares a scale of 8 bits among the fewest weights: larger blocks cost
# the demo a quarter of its 0.0005 nat, and its steps are short anyway.
_NARROW = 1024
ROUNDED = ("embedding", "head", "mixer", "mlp", "experts")
_SENSITIVE = {"gates": FLOAT, "router": FLOAT}
# "x": Mamba's x_proj makes the steps dt
_WORDS = {
    "gates": {"beta", "decay", "dt", "x"},
    "router": {"router"},
    "conv": {"conv"},
    "norm": {"norm"},
}
_BITS = {"int4": 4, "int8": 8, "float": FLOAT}
_NAMES = {bits: name for name, bits in _BITS.items()}


class Format(NamedTuple):
    """How one matrix is stored."""

    bits: int
    block_size: int  # weights that share a scale


def role_of(parameter: str) -> str:
    """The role of a matrix by the words in its name; experts are told by their operator."""
    words = set(re.split(r"[._]", parameter))
    parts = parameter.split(".")
    for role, own in _WORDS.items():
        if words & own:
            return role
    if parts[0] in ("embedding", "head"):
        return parts[0]
    return "mixer" if {"mixer", "side"} & set(parts) else "mlp"


@dataclass(frozen=True)
class Recipe:
    """How a variant's weights are stored.

    Args:
        roles: Role to bits: 4, 8 or 32 for float.
        block_size: Weights of 4 bits that share a scale, at most: halved, down to 32, until enough
            blocks fill the rows of a matrix.
        precise_block_size: The same of 8 bits.
        row_blocks: Blocks that are enough; narrow models feel a shared scale more.
        accuracy_level: onnxruntime's arithmetic: 4 multiplies in int8.
        method: ``"nearest"`` or ``"gptq"``.
        matrices: Parameters that differ from their role; None: float.
        budget_kl: What the variant may cost, in nat a token, if a budget was given.
    """

    roles: Mapping[str, int]
    block_size: int = 32
    # With AVX-512 a step of a 374M model takes 0.7 of the time that it takes with 32.
    precise_block_size: int = 128
    row_blocks: int = 8
    accuracy_level: int = 4
    method: str = "nearest"
    matrices: Mapping[str, Format | None] = field(default_factory=dict)
    budget_kl: float | None = None

    @classmethod
    def of(cls, bits: int, *, roles: Mapping[str, int] | None = None, **options: Any) -> Recipe:
        """The usual roles with these bits, but for those in ``roles``."""
        own = {**dict.fromkeys(ROUNDED, bits), **_SENSITIVE, **(roles or {})}
        return cls(own, **options)

    @property
    def is_auto(self) -> bool:
        """Whether the bits of some matrices are to be chosen one by one."""
        return any(role not in self.roles for role in ROUNDED)

    @property
    def bits(self) -> int:
        """The fewest that a matrix may have."""
        formats = [f.bits for f in self.matrices.values() if f is not None]
        return min([*self.roles.values(), *formats])

    def with_roles(self, given: Mapping[str, int], *, tied: bool) -> Recipe:
        """With some roles changed; of a tied head and embedding either one stands for both."""
        roles = {**self.roles, **given}
        if tied:
            pair = {given[role] for role in ("embedding", "head") if role in given}
            if len(pair) > 1:
                raise EdgelinError(
                    "--role gives embedding and head different bits, but in this model they are "
                    "one matrix; give one of them"
                )
            if pair or "embedding" in roles:
                roles["embedding"] = roles["head"] = pair.pop() if pair else roles["embedding"]
        return dataclasses.replace(self, roles=roles)

    def for_model(
        self, config: ModelConfig, given: Iterable[str] = (), *, mixers_only: bool = False
    ) -> Recipe:
        """For a certain model.

        Args:
            config: The model's.
            given: Values of ``--role``.
            mixers_only: Whether it has mixers only, of which nothing else could take fewer bits.

        Raises:
            EdgelinError: The roles are wrong, or leave nothing to round.
        """
        roles = dict(self.roles)
        if config.features is not None:  # the first projection and the head are small
            roles |= {"embedding": FLOAT, "head": FLOAT}
        if mixers_only and "mlp" in roles:
            roles["mixer"] = roles["mlp"]
        chosen = dataclasses.replace(self, roles=roles)
        if config.hidden_size < _NARROW:
            chosen = dataclasses.replace(chosen, precise_block_size=_LEAST_BLOCK)
        tied = config.features is None and config.tie_word_embeddings
        chosen = chosen.with_roles(read_roles(given), tied=tied)
        if not chosen.is_auto and chosen.bits == FLOAT:
            raise EdgelinError(
                "--role keeps every matrix float; give --quantize none for a float bundle"
            )
        return chosen

    def format(self, name: str, role: str, widths: Iterable[int]) -> Format | None:
        """How a matrix, or several that share a format, are stored; None: float.

        Args:
            name: Of the first parameter.
            role: Of the matrices.
            widths: Length of their rows.
        """
        if name in self.matrices:
            return self.matrices[name]
        bits = self.roles.get(role, FLOAT)
        return None if bits == FLOAT else Format(bits, self.block(bits, *widths))

    def block(self, bits: int, *widths: int) -> int:
        """Weights that share a scale in matrices of these bits, whose rows are so wide."""
        size = self.precise_block_size if bits == 8 else self.block_size
        least = self.row_blocks
        while size > _LEAST_BLOCK and any(w % size or w < least * size for w in widths):
            size //= 2
        return size

    def as_dict(self, bits: int) -> dict[str, Any]:
        """The entry in the manifest of a graph whose matrices have at least so many bits."""
        entry: dict[str, Any] = {
            "bits": bits,
            "method": self.method,
            "roles": {
                **{role: _name(self.roles.get(role)) for role in (*ROUNDED, *_SENSITIVE)},
                **dict.fromkeys(ALWAYS_FLOAT, "float"),
            },
            "block_size": self.block_size,
            "precise_block_size": self.precise_block_size,
            "row_blocks": self.row_blocks,
            "accuracy_level": self.accuracy_level,
        }
        if self.matrices:
            entry["matrices"] = {
                name: "float" if f is None else f"{_NAMES[f.bits]}/{f.block_size}"
                for name, f in self.matrices.items()
            }
        if self.budget_kl is not None:
            entry["budget_kl"] = self.budget_kl
        return entry


# Of the demo model's parts, the mixers gain most from 8 bits beside 4-bit MLPs: top-1 agreement
# with the float model 93.0 %, where all matrices at 4 bits give 90.9 %. But a step of int4 takes as
# long as one of int8: fewer scales are what makes it shorter. int4-fast is 0.028 nat from the float
# demo, int4 0.011; symmetric blocks of 32 in all matrices, such as llama.cpp's Q4_0, are 0.034.
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "int8": Recipe.of(8),
    "int4": Recipe.of(4, roles={"embedding": 8, "mixer": 8}),
    "int4-fast": Recipe.of(4, roles={"embedding": 8}, block_size=256, row_blocks=4),
    "auto": Recipe(_SENSITIVE, block_size=256, row_blocks=4),
    "portable": Recipe.of(4, roles={"embedding": 8, "mixer": 8}),
}


# Variant to the name of its files; the first that a bundle has is the one that runs.
VARIANTS = {
    "auto": "model_auto",
    "int8": "model_q8",
    "int4": "model_q4",
    "int4-fast": "model_q4_fast",
    "none": "model",
    "portable": "model_quantized",
}


def find_recipes(
    names: Iterable[str], roles: Iterable[str] = (), *, calibrated: bool = False
) -> dict[str, Recipe | None]:
    """The recipes asked for, each once.

    Args:
        names: Of ``VARIANTS``.
        roles: Values of ``--role``.
        calibrated: Whether there is a text.

    Raises:
        EdgelinError: There is none of a name, it needs a text, or nothing is there to round.
    """
    names, roles = tuple(names), tuple(roles)
    for name in names or ("",):
        if name not in RECIPES:
            raise EdgelinError(f"--quantize is {name!r}; allowed: {', '.join(RECIPES)}")
    if "auto" in names and not calibrated:
        raise EdgelinError(
            "--quantize auto chooses by what it measures on a text; give --calibrate FILE"
        )
    read_roles(roles)
    if (roles or calibrated) and set(names) <= {"none"}:
        raise EdgelinError(
            "--role and --calibrate are about rounded weights; give --quantize int4, int8 or auto"
        )
    return {name: RECIPES[name] for name in names}


def _name(bits: int | None) -> str:
    """Of the bits of a role; those of ``--quantize auto`` differ from matrix to matrix."""
    return "auto" if bits is None else _NAMES[bits]


def read_roles(given: Iterable[str]) -> dict[str, int]:
    """Values of ``--role``, such as ``head=int8``, as role to bits.

    Raises:
        EdgelinError: There is no such role, it is always float, it has bits already, or the bits
            are none.
    """
    roles: dict[str, int] = {}
    for text in given:
        role, _, bits = text.partition("=")
        if role in ALWAYS_FLOAT and bits != "float":
            raise EdgelinError(
                f"--role {text}: tensors of the role {role} are always float; leave it out"
            )
        known = (*ROUNDED, *_SENSITIVE)
        if role not in (*known, *ALWAYS_FLOAT) or bits not in _BITS:
            raise EdgelinError(
                f"--role is {text!r}; give ROLE=BITS with one of {', '.join(known)} and one of "
                f"{', '.join(_BITS)}"
            )
        if roles.get(role, _BITS[bits]) != _BITS[bits]:
            raise EdgelinError(f"--role gives {role} bits twice; keep one of them")
        if role in known:
            roles[role] = _BITS[bits]
    return roles
