"""What the configs and weights of several families have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgelin.errors import EdgelinError
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig


def layer_types(
    fields: Fields, words: Mapping[str, str], default: Sequence[str], *, key: str = "layer_types"
) -> list[str]:
    """The kind of every layer from ``layer_types``.

    Args:
        fields: Of the config; ``num_hidden_layers`` is taken too.
        words: What a layer may be called, and how we call it.
        default: Our names where there are no ``layer_types``.
        key: The family's own name of them.

    Raises:
        EdgelinError: A word that the family does not know, or not a word a layer.
    """
    found = fields.take(key, None)
    names = list(default) if found is None else [words.get(word, "") for word in found]
    if not all(names):
        word = found[names.index("")]
        raise EdgelinError(
            f"{fields.where}: {key} has {word!r}; supported: {', '.join(map(repr, words))}"
        )
    count = fields.take("num_hidden_layers")
    if len(names) != count:
        raise EdgelinError(
            f"{fields.where}: {key} has {len(names)} words for num_hidden_layers = {count}"
        )
    return names


def rope(
    fields: Fields,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    harmless: Sequence[str] = (),
) -> dict[str, Any]:
    """Rotation as options of our attention, from ``rope_parameters`` or the older keys.

    Args:
        fields: Of the config; ``rope_parameters`` is a flat table there.
        head_dim: Width of a head.
        theta: The family's base where the config has none.
        partial: The family's share of a head that is rotated.
        harmless: Keys of ``rope_parameters`` that change nothing in this family.

    Raises:
        EdgelinError: The frequencies are scaled.
    """
    theta = fields.take("rope_theta", theta)
    partial = fields.take("partial_rotary_factor", partial)
    for name in ("rope_scaling", "rope_parameters"):
        if not fields.has(name):
            continue
        inner = fields.nested(name)
        inner.expect("rope_type", "default")
        inner.expect("type", "default")
        theta = inner.take("rope_theta", theta)
        partial = inner.take("partial_rotary_factor", partial)
        inner.ignore(*harmless)
        inner.finish()
    return {"rope_theta": float(theta), "rotary_dim": int(head_dim * partial)}


def state_spaces(fields: Fields, table: Callable[[Fields, int], dict[str, Any]]) -> ModelConfig:
    """Sizes of a model of the original code of Mamba; an absent key has the default of its class.

    Args:
        fields: Of the config.
        table: Makes the mixer's table of ``ssm_cfg`` and the hidden size.
    """
    fields.expect("d_intermediate", 0)
    fields.expect("attn_layer_idx", [])
    fields.ignore("attn_cfg", "residual_in_fp32", "fused_add_norm")
    hidden = fields.take("d_model")
    multiple = fields.take("pad_vocab_size_multiple", 8)
    own = fields.nested("ssm_cfg")
    own.ignore("layer", "dt_min", "dt_max", "dt_init_floor")  # initial values
    mixer = table(own, hidden)
    own.finish()
    return ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=("mamba",) * fields.take("n_layer"),
        mixers={"mamba": mixer},
        vocab_size=-(-fields.take("vocab_size") // multiple) * multiple,
        tie_word_embeddings=fields.take("tie_embeddings", True),
        rms_norm_eps=1e-5,
        norm="rms" if fields.take("rms_norm", True) else "layer",
    )


def stacked(tensors: Tensors, *names: str) -> Tensor:
    """Several tensors as the rows of one."""
    return torch.cat([tensors(name) for name in names])


def head(
    tensors: Tensors,
    tied: bool,
    *,
    name: str = "lm_head.weight",
    embedding: str = "model.embed_tokens.weight",
) -> Iterator[tuple[str, Tensor]]:
    """The head's weight, unless it is the embedding's, of which a file may hold a copy.

    Raises:
        EdgelinError: They are said to be one, and the file holds two.
    """
    if not tied:
        yield "head.weight", tensors(name)
    elif tensors.has(name) and not torch.equal(tensors(name), tensors(embedding)):
        raise EdgelinError(
            f"{tensors.where}: {name} is not {embedding}, though the config ties them; set "
            f"tie_word_embeddings to false in config.json if the head is one of its own"
        )


def gated_mlp(tensors: Tensors, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our gated MLP from ``gate_proj``, ``up_proj`` and ``down_proj``."""
    both = stacked(tensors, f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    yield "gate_up_proj.weight", both
    yield "down_proj.weight", tensors(f"{prefix}down_proj.weight")


def experts(
    tensors: Tensors,
    prefix: str,
    count: int,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    together: Sequence[str] = ("gate_up_proj", "down_proj"),
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our experts, whose rows of gate and up alternate.

    Args:
        tensors: Of the checkpoint: all experts in one tensor, or each on its own.
        prefix: Of the experts' names.
        count: Experts E.
        names: Of gate, up and down of an expert on its own.
        together: Of gate and up of all experts `[E, 2 I, H]`, and of down `[E, H, I]`.
    """
    if tensors.has(f"{prefix}{together[0]}"):
        gate, up = tensors(f"{prefix}{together[0]}").chunk(2, dim=1)
        down = tensors(f"{prefix}{together[1]}")
    else:
        gate, up, down = (
            torch.stack([tensors(f"{prefix}{i}.{name}.weight") for i in range(count)])
            for name in names
        )
    yield "gate_up_proj", torch.stack([gate, up], dim=2).flatten(1, 2)
    yield "down_proj", down


def sparse_layers(
    sparse: Sequence[bool], moe: Mapping[str, Any], width: int
) -> tuple[int, tuple[str, ...], dict[str, dict[str, Any]]]:
    """``intermediate_size``, ``mlps`` and tables of a model in which experts follow some mixers.

    Args:
        sparse: For every layer whether they are experts.
        moe: The table of the experts.
        width: Of the MLPs in the other layers.
    """
    if not any(sparse):
        return width, (), {}
    names = tuple("moe" if experts else "mlp" for experts in sparse)
    tables = {"moe": dict(moe), "mlp": {"type": "mlp", "intermediate_size": width}}
    return 0, names, {name: tables[name] for name in sorted(set(names))}


def scaled(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """A tensor times a constant, in float32; a factor of 1 leaves it as it is stored."""
    if isinstance(factor, float | int) and factor == 1:
        return tensor
    return tensor.float() * factor


def step_limits(fields: Fields, name: str = "time_step_limit") -> dict[str, Any]:
    """The limits of dt as options of our Mamba-2.

    They are no initial values: ``time_step_min`` and ``time_step_max`` are those, and bound
    nothing in the published models.
    """
    low, high = fields.take(name, (0.0, math.inf))
    return {"min_dt": float(low), "max_dt": None if high == math.inf else float(high)}


def mamba(tensors: Tensors, prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our Mamba, but for its norms, from the layout that all its families have."""
    for name in ("in_proj", "out_proj"):
        yield f"{name}.weight", tensors(f"{prefix}{name}.weight")
        if table["bias"]:
            yield f"{name}.bias", tensors(f"{prefix}{name}.bias")
    yield "conv_weight", tensors(f"{prefix}conv1d.weight")[:, 0]
    if table["conv_bias"]:
        yield "conv_bias", tensors(f"{prefix}conv1d.bias")
    for name in ("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D"):
        yield name, tensors(f"{prefix}{name}")


def mamba2(
    tensors: Tensors,
    prefix: str,
    table: Mapping[str, Any],
    *,
    inputs: float = 1.0,
    rows: float | Tensor = 1.0,
    outputs: float = 1.0,
) -> Iterator[tuple[str, Tensor]]:
    """Parameters of our Mamba-2 from the layout that all transformers families have.

    ``in_proj`` holds the rows of the gate, of x, B, C and of the step; we keep the step in a
    projection of its own, and its bias in ``dt_bias``.

    Args:
        tensors: Of the checkpoint.
        prefix: Of the mixer's names.
        table: The mixer's table.
        inputs: Factor on what the mixer reads.
        rows: Factor on what ``in_proj`` gives, bias included: a number, or one a row.
        outputs: Factor on what the mixer gives.
    """
    heads = table["num_heads"]
    projection = scaled(tensors(f"{prefix}in_proj.weight"), inputs)
    if isinstance(rows, Tensor) and len(rows) != len(projection):
        raise EdgelinError(
            f"{tensors.where}: {prefix}in_proj.weight has {len(projection)} rows, the config makes "
            f"it {len(rows)}; config.json and the weights do not belong together"
        )
    projection = scaled(projection, rows[:, None] if isinstance(rows, Tensor) else rows)
    yield "in_proj.weight", projection[:-heads]
    yield "dt_proj.weight", projection[-heads:]
    step = tensors(f"{prefix}dt_bias")
    if table["bias"]:
        bias = scaled(tensors(f"{prefix}in_proj.bias"), rows)
        yield "in_proj.bias", bias[:-heads]
        step = step.float() + bias[-heads:].float()
    yield "dt_bias", step
    yield "conv_weight", tensors(f"{prefix}conv1d.weight")[:, 0]
    if table["conv_bias"]:
        yield "conv_bias", tensors(f"{prefix}conv1d.bias")
    for name in ("A_log", "D"):
        yield name, tensors(f"{prefix}{name}")
    if table["norm"] != "none":
        yield "norm.weight", tensors(f"{prefix}norm.weight")
    yield "out_proj.weight", scaled(tensors(f"{prefix}out_proj.weight"), outputs)
    if table["out_bias"]:
        yield "out_proj.bias", scaled(tensors(f"{prefix}out_proj.bias"), outputs)


def mamba2_table(fields: Fields, inner: int) -> dict[str, Any]:
    """Our Mamba-2 from the keys ``mamba_*``, which several hybrids have.

    Args:
        fields: Of the config.
        inner: Channels of all heads.

    Raises:
        EdgelinError: The heads do not have so many.
    """
    heads = fields.take("mamba_n_heads")
    head_dim = fields.take("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = inner // heads
    if heads * head_dim != inner:
        raise EdgelinError(
            f"{fields.where}: mamba_n_heads = {heads} heads of mamba_d_head = {head_dim} are not "
            f"the {inner} channels that mamba_expand or mamba_d_ssm says"
        )
    bias = fields.take("mamba_proj_bias", False)
    fields.ignore("mamba_chunk_size")
    return {
        "type": "mamba2",
        "num_heads": heads,
        "head_dim": head_dim,
        "state_size": fields.take("mamba_d_state"),
        "num_groups": fields.take("mamba_n_groups", 1),
        "conv_size": fields.take("mamba_d_conv", 4),
        "norm": "after_gate",
        "bias": bias,
        "out_bias": bias,
        "conv_bias": fields.take("mamba_conv_bias", True),
        **step_limits(fields),
    }


def attention_table(fields: Fields) -> dict[str, Any]:
    """Sizes of attention over all tokens; how it rotates is to be added."""
    heads = fields.take("num_attention_heads")
    bias = fields.take("attention_bias", False)
    return {
        "type": "attention",
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", heads),
        "head_dim": fields.take("head_dim", fields.take("hidden_size") // heads),
        "window": 0,
        "bias": bias,
        "out_bias": bias,
    }


def attention(
    tensors: Tensors,
    prefix: str,
    table: Mapping[str, Any],
    *,
    inputs: float = 1.0,
    queries: float = 1.0,
    keys: float = 1.0,
    outputs: float = 1.0,
) -> Iterator[tuple[str, Tensor]]:
    """Projections of our attention from those of queries, keys, values and outputs.

    Args:
        tensors: Of the checkpoint.
        prefix: Of the mixer's names.
        table: The mixer's table.
        inputs: Factor on what the mixer reads.
        queries: Factor on queries.
        keys: Factor on keys.
        outputs: Factor on what the mixer gives.
    """
    rows = {"q": queries, "k": keys, "v": 1.0}
    for part in ("weight", "bias") if table["bias"] else ("weight",):
        own = [scaled(tensors(f"{prefix}{n}_proj.{part}"), f) for n, f in rows.items()]
        yield f"qkv_proj.{part}", scaled(torch.cat(own), inputs if part == "weight" else 1.0)
    for part in ("weight", "bias") if table["out_bias"] else ("weight",):
        yield f"out_proj.{part}", scaled(tensors(f"{prefix}o_proj.{part}"), outputs)


__all__ = [
    "attention",
    "attention_table",
    "experts",
    "gated_mlp",
    "head",
    "layer_types",
    "mamba2",
    "mamba2_table",
    "rope",
    "scaled",
    "sparse_layers",
    "stacked",
    "step_limits",
]
