"""The mixers of fla's research models as tables and parameters of ours.

What differs from the papers, and so from what our mixers do by themselves: retention turns queries
and keys by RoPE's angles; HGRN2's output norm adds 1e-5 whatever the config says; linear attention
divides by the square root of the number of features before its norm, whose epsilon is that much
larger for us. Key heads that serve several query heads are stored once a query head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgelin.families.common import stacked
from edgelin.families.reading import Fields, Tensors

Parameters = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Reader:
    """A mixer: its table in a layer, and its parameters from the prefix of their names there."""

    table: Callable[[int], dict[str, Any]]
    weights: Callable[[Tensors, str, int], Parameters]


def _expanded(fields: Fields, hidden: int, expand_k: float, expand_v: float) -> dict[str, Any]:
    """Sizes from the shares that keys and values take of the stream."""
    heads = fields.take("num_heads")
    return {
        "num_heads": heads,
        "key_dim": round(hidden * fields.take("expand_k", expand_k)) // heads,
        "value_dim": round(hidden * fields.take("expand_v", expand_v)) // heads,
    }


def _group(fields: Fields, heads: int) -> int:
    """Query heads that share a key head."""
    group: int = heads // fields.take("num_kv_heads", heads)
    return group


def _each(rows: Tensor, width: int, group: int) -> Tensor:
    """Rows `[heads * width, ...]` of key heads, once for every query head."""
    if group == 1:
        return rows
    heads: Tensor = rows.unflatten(0, (-1, width))
    return heads.repeat_interleave(group, dim=0).flatten(0, 1)


def _qkv(tensors: Tensors, prefix: str, table: dict[str, Any], group: int = 1) -> list[Tensor]:
    """Rows of queries, keys and values of all heads."""
    q, k, v = (tensors(f"{prefix}{name}_proj.weight") for name in "qkv")
    return [q, _each(k, table["key_dim"], group), _each(v, table["value_dim"], group)]


def _norm(tensors: Tensors, prefix: str, names: tuple[str, ...], width: int, has: bool) -> Tensor:
    """The weight of an output norm under the first of these names that is there; ones without."""
    if not has:
        return torch.ones(width)
    name = next((name for name in names if tensors.has(f"{prefix}{name}.weight")), names[0])
    return tensors(f"{prefix}{name}.weight")


def _gated(fields: Fields, table: dict[str, Any], decay: bool) -> Reader:
    """GLA, and retention, which has no decay to read."""
    group = _group(fields, table["num_heads"])
    affine = fields.take("elementwise_affine", True)
    fields.expect("feature_map")
    fields.expect("use_short_conv", False)
    fields.expect("use_output_gate", True)
    fields.expect("clamp_min")
    fields.expect("use_gk", True)
    fields.expect("use_gv", False)
    fields.ignore("conv_size")

    def weights(tensors: Tensors, prefix: str, _: int) -> Parameters:
        rows = [*_qkv(tensors, prefix, table, group), tensors(f"{prefix}g_proj.weight")]
        yield "qkv_gate_proj.weight", torch.cat(rows)
        if decay:
            yield "decay_in_proj.weight", tensors(f"{prefix}gk_proj.0.weight")
            for kind in ("weight", "bias"):
                outer = tensors(f"{prefix}gk_proj.1.{kind}")
                yield f"decay_out_proj.{kind}", _each(outer, table["key_dim"], group)
        names = ("g_norm_swish_gate", "g_norm")  # fused with the gate, or not
        yield "norm.norm.weight", _norm(tensors, prefix, names, table["value_dim"], affine)
        yield "out_proj.weight", tensors(f"{prefix}o_proj.weight")

    return Reader(lambda _: table, weights)


def _gla(fields: Fields, hidden: int) -> Reader:
    """Gated linear attention."""
    return _gated(fields, {"type": "gla", **_expanded(fields, hidden, 0.5, 1.0)}, decay=True)


def _retnet(fields: Fields, hidden: int) -> Reader:
    """Retention."""
    sizes = _expanded(fields, hidden, 1.0, 2.0)
    return _gated(fields, {"type": "retention", "rope": True, **sizes}, decay=False)


def _delta(tensors: Tensors, prefix: str, gates: list[str], gated: str) -> Parameters:
    """What DeltaNet, Gated DeltaNet and KDA have alike.

    Args:
        tensors: Of the checkpoint.
        prefix: Of the mixer's names.
        gates: Projections of beta and of the decay.
        gated: The projection of the output gate; empty: there is none.
    """
    names = [*(f"{prefix}{name}_proj" for name in "qkv"), *([f"{prefix}{gated}"] if gated else [])]
    yield "qkv_gate_proj.weight", stacked(tensors, *(f"{name}.weight" for name in names))
    convs = [f"{prefix}{name}_conv1d.weight" for name in "qkv"]
    yield "conv_weight", stacked(tensors, *convs)[:, 0]
    yield "beta_decay_proj.weight", stacked(tensors, *(f"{prefix}{g}.weight" for g in gates))
    yield "out_proj.weight", tensors(f"{prefix}o_proj.weight")


def _delta_options(fields: Fields) -> dict[str, Any]:
    """Options that all three have."""
    fields.expect("use_short_conv", True)
    return {
        "conv_size": fields.take("conv_size", 4),
        "allow_neg_eigval": fields.take("allow_neg_eigval", False),
    }


def _delta_net(fields: Fields, hidden: int) -> Reader:
    """DeltaNet."""
    gate = fields.take("use_gate", False)
    sizes = {**_expanded(fields, hidden, 1.0, 1.0), **_delta_options(fields)}
    table = {"type": "deltanet", "output_gate": gate, **sizes}
    fields.expect("use_beta", True)
    fields.expect("qk_norm", "l2")
    fields.expect("qk_activation", "silu")
    fields.ignore("use_output_norm")  # fla's layer has the norm in any case

    def weights(tensors: Tensors, prefix: str, _: int) -> Parameters:
        yield from _delta(tensors, prefix, ["b_proj"], "g_proj" if gate else "")
        yield "norm.norm.weight", tensors(f"{prefix}o_norm.weight")

    return Reader(lambda _: table, weights)


def _delta_heads(fields: Fields, expand_v: float, heads: int, width: int) -> dict[str, Any]:
    """Sizes of Gated DeltaNet and KDA, whose heads have a width of their own."""
    keys, width = fields.take("num_heads", heads), fields.take("head_dim", width)
    return {
        "num_heads": fields.take("num_v_heads", keys),
        "num_key_heads": keys,
        "key_dim": width,
        "value_dim": round(width * fields.take("expand_v", expand_v)),
        **_delta_options(fields),
    }


def _gated_deltanet(fields: Fields, _: int) -> Reader:
    """Gated DeltaNet."""
    gate = fields.take("use_gate", True)
    sizes = _delta_heads(fields, 2.0, 6, 256)
    table = {"type": "gated_deltanet", "output_gate": gate, **sizes}
    fields.expect("output_gate_activation", "swish", "silu")

    def weights(tensors: Tensors, prefix: str, _: int) -> Parameters:
        yield from _delta(tensors, prefix, ["b_proj", "a_proj"], "g_proj" if gate else "")
        for name in ("A_log", "dt_bias"):
            yield name, tensors(f"{prefix}{name}")
        yield "norm.norm.weight", tensors(f"{prefix}o_norm.weight")

    return Reader(lambda _: table, weights)


def _kda(fields: Fields, _: int) -> Reader:
    """Kimi Delta Attention; ``safe_gate`` only picks a kernel, ``lower_bound`` changes the gate."""
    bound = fields.take("lower_bound", None)
    table = {"type": "kda", "lower_bound": bound, **_delta_heads(fields, 1.0, 16, 128)}
    fields.ignore("safe_gate")

    def weights(tensors: Tensors, prefix: str, _: int) -> Parameters:
        yield from _delta(tensors, prefix, ["b_proj", "f_proj.0"], "g_proj.0")
        yield "decay_out_proj.weight", tensors(f"{prefix}f_proj.1.weight")
        for kind in ("weight", "bias"):
            yield f"gate_out_proj.{kind}", tensors(f"{prefix}g_proj.1.{kind}")
        for name in ("A_log", "dt_bias"):
            yield name, tensors(f"{prefix}{name}").flatten()
        yield "norm.weight", tensors(f"{prefix}o_norm.weight")

    return Reader(lambda _: table, weights)


def _hgrn2(fields: Fields, hidden: int) -> Reader:
    """HGRN2: a head's keys are as wide as ``expand_ratio``, its values share the stream."""
    bounded = fields.take("use_lower_bound", True)
    affine = fields.take("elementwise_affine", True)
    heads = fields.take("num_heads", None)
    ratio = fields.take("expand_ratio", hidden // heads if heads else 128)
    heads = hidden // ratio
    table = {
        "type": "hgrn2",
        "num_heads": heads,
        "key_dim": ratio,
        "value_dim": hidden // heads,
        "norm_eps": 1e-5,
    }
    fields.expect("use_short_conv", False)
    fields.ignore("conv_size")

    def weights(tensors: Tensors, prefix: str, layer: int) -> Parameters:
        rows = (f"{prefix}{name}_proj.weight" for name in "qi")
        yield "qv_proj.weight", stacked(tensors, *rows)
        yield "decay_proj.weight", tensors(f"{prefix}f_proj.weight")
        if bounded:
            shares = tensors.full("model.lower_bounds").double()
            if layer:
                below, above = shares[1 : layer + 1], torch.cat([shares[:1], shares[layer + 1 :]])
                logit = below.logsumexp(0) - above.logsumexp(0)  # of the running sum of softmax
                yield "lower_bound_logit", logit.float()
        yield "norm.weight", _norm(tensors, prefix, ("g_norm",), hidden, affine)
        yield "out_proj.weight", tensors(f"{prefix}o_proj.weight")

    # The first layer has no bound; that of the others is read, not the one a table begins with.
    return Reader(lambda i: {**table, "lower_bound": 0.5 if bounded and i else 0.0}, weights)


_MAPS = {
    "elementwise_product": "product", "elu": "elu", "identity": "identity", "relu": "relu",
    "t2r": "relu",
}  # fmt: skip


def _linear_attn(fields: Fields, hidden: int) -> Reader:
    """Linear attention with an output norm; the linear part of ``t2r`` goes into q and k."""
    kind = fields.take("feature_map", "elementwise_product")
    fields.expect("feature_map", *_MAPS)
    sizes = _expanded(fields, hidden, 1.0, 1.0)
    heads, width = sizes["num_heads"], sizes["key_dim"]
    group, affine = _group(fields, heads), fields.take("elementwise_affine", True)
    tied = fields.take("tie_feature_map_qk", False)
    for name in ("norm_q", "norm_k", "norm_feature_map"):
        fields.expect(name, False)
    table = {
        "type": "linear_attention",
        "feature_map": _MAPS[kind],
        "normalize": "rms",
        "norm_eps": fields.take("norm_eps", 1e-6) * width,
        **sizes,
    }

    def weights(tensors: Tensors, prefix: str, _: int) -> Parameters:
        def learned(part: str, layer: str) -> Tensor:
            """A parameter of the map of queries or keys; a tied one is stored once or twice."""
            name = f"{prefix}feature_map_{part}.{layer}"
            other = f"{prefix}feature_map_{'k' if part == 'q' else 'q'}.{layer}"
            return tensors.full(other if tied and not tensors.has(name) else name)

        q, k, v = _qkv(tensors, prefix, table, group)
        if kind == "t2r":
            q, k = (
                torch.matmul(learned(part, "layer.weight"), rows.float().unflatten(0, (heads, -1)))
                for part, rows in (("q", q), ("k", k))
            )
            q, k = q.flatten(0, 1), k.flatten(0, 1)
        yield "qkv_proj.weight", torch.cat([q, k, v])
        if kind == "elementwise_product":
            for name in ("weight", "bias"):
                both = [
                    torch.cat([learned(part, f"layer{i}.{name}") for i in (1, 2)]) for part in "qk"
                ]
                each = torch.stack(both).repeat_interleave(heads, dim=0)
                each = each.transpose(1, 2) if name == "weight" else each[:, None]
                yield f"feature_map.{name}", each
        yield "norm.weight", _norm(tensors, prefix, ("norm",), table["value_dim"], affine)
        yield "out_proj.weight", tensors(f"{prefix}o_proj.weight")

    return Reader(lambda _: table, weights)


READERS: dict[str, Callable[[Fields, int], Reader]] = {
    "gla": _gla,
    "retnet": _retnet,
    "delta_net": _delta_net,
    "gated_deltanet": _gated_deltanet,
    "kda": _kda,
    "hgrn2": _hgrn2,
    "linear_attn": _linear_attn,
}

__all__ = ["READERS", "Reader"]
