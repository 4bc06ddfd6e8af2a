"""Linear attention with a normaliser, or with an output norm a head.

    S_t = S_{t-1} + phi(k_t) v_t^T ;  z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t . phi(q_t) + eps)        normalize = "z"
    o_t = RMSNorm(S_t^T phi(q_t))                        normalize = "rms", without z

phi is one of :mod:`edgelin.feature_maps`, elu(x) + 1 unless told. With ``causal = false`` every
token sees the whole sequence (:mod:`edgelin.recurrences.linear.bidirectional`), for encoders: such
a layer has no state and no step, and a language model of it would read its own answers.

S and z grow with t until float32 drops new increments. With ``compensated = true`` each has a
second state for the last tokens (:mod:`edgelin.recurrences.linear.two_level`), which carries it
through any stream, in training and in all profiles; the state is twice as large.

Sources: Katharopoulos et al., "Transformers are RNNs" (2020), arXiv:2006.16236, eq. 7 (phi) and
eq. 16 to 20 (the recurrence); Qin et al., "The devil in linear transformer" (2022),
arXiv:2210.10340, section 4.1 (a norm in the place of z).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgelin import feature_maps
from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm, project_in_parts
from edgelin.mixers import HeadSizes, check_eps, check_sizes
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.linear import linear
from edgelin.recurrences.linear.bidirectional import bidirectional
from edgelin.recurrences.linear.two_level import two_level
from edgelin.state import StateSpec


@dataclass(frozen=True)
class FeatureSizes(HeadSizes):
    """Sizes of a mixer behind a feature map.

    Args:
        feature_map: One of ``edgelin.feature_maps.NAMES``.
        num_features: Random features of "favor"; None: 4 K.
        normalize: "z", the sum of the weights, or "rms", an output norm a head.
        norm_eps: Added to the mean square in that norm; None: the model's.
    """

    feature_map: str = "elu"
    num_features: int | None = None
    normalize: str = "z"
    norm_eps: float | None = None

    causal = True
    compensated = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "key_dim", "value_dim")
        check_eps(self, "norm_eps")
        if self.num_features is not None:
            check_sizes(self, "num_features")
            if self.feature_map != "favor":
                raise EdgelinError(
                    f"num_features is {self.num_features}, but feature_map {self.feature_map!r} "
                    f"has a number of its own; leave it out or take 'favor'"
                )
        if self.normalize not in ("z", "rms"):
            raise EdgelinError(f"normalize is {self.normalize!r}; allowed: z, rms")
        signed = feature_maps.find(self.feature_map, self.key_dim).signed
        if self.normalize == "z" and signed:
            raise EdgelinError(
                f"feature_map {self.feature_map!r} has features of both signs, whose sum can't "
                f"divide; set normalize to 'rms'"
            )

    def features(self) -> feature_maps.FeatureMap:
        """A new feature map of these sizes."""
        return feature_maps.build(
            self.feature_map,
            num_heads=self.num_heads,
            width=self.key_dim,
            num_features=self.num_features,
        )


@dataclass(frozen=True)
class Config(FeatureSizes):
    """Sizes of the mixer.

    Args:
        causal: Whether a token sees the tokens up to itself, or all of a call.
        compensated: Whether the sums have a second level for long streams.
    """

    causal: bool = True
    compensated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compensated and not self.causal:
            raise EdgelinError(
                "compensated is true, but causal is false: without a state there is nothing to "
                "compensate; leave one of them out"
            )

    @property
    def export_obstacle(self) -> str | None:
        """Why a mixer of these sizes can't be exported; None: it can."""
        if self.causal:
            return None
        return (
            "linear attention with causal = false can't be exported: it needs the whole sequence "
            "at once and has no step; set causal to true"
        )


class Mixer(nn.Module):
    """Linear attention.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    def __init__(self, config: FeatureSizes, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.needs_position = config.compensated
        heads = config.num_heads
        self.sizes = [2 * heads * config.key_dim, heads * config.value_dim]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.feature_map = config.features()
        if config.normalize == "rms":
            self.norm = RMSNorm(config.value_dim, config.norm_eps or norm_eps)
        self.out_proj = nn.Linear(self.sizes[1], hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """S, and z where it normalises, each with its recent part where sums have two levels."""
        if not self.config.causal:
            return []
        heads, size = self.config.num_heads, self.feature_map.size
        specs = [HeadSizes(heads, size, self.config.value_dim).matrix_spec(self.layer)]
        if self.config.normalize == "z":
            specs.append(StateSpec("normalizer", self.layer, (heads, size), "batch heads key"))
        if not self.config.compensated:
            return specs
        recent = [dataclasses.replace(spec, kind=f"{spec.kind}_recent") for spec in specs]
        return [spec for pair in zip(specs, recent, strict=True) for spec in pair]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        qk, v = project_in_parts(self.qkv_proj, x, self.sizes)
        q, k = self.feature_map(qk.unflatten(-1, (2 * c.num_heads, c.key_dim)))
        v = v.unflatten(-1, (c.num_heads, c.value_dim))
        if c.compensated:
            o, after = self._recur_long(q, k, v, state, position, lengths)
        elif c.causal:
            o, after = self._recur(q, k, v, state, lengths)
        else:
            o, after = self._attend(q, masked(k, lengths), v), {}
        if c.normalize == "rms":
            o = self.norm(o)
        return self.out_proj(o.flatten(-2)), after

    def decayed(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Keys as they are written `[B, T, H, F]`, and the log decay `[B, T, H]` or None."""
        return k, None

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs and states of the recurrence."""
        names = [spec.name for spec in self.state_specs()]
        z = state[names[1]] if self.config.normalize == "z" else None
        k, g = self.decayed(k)
        o, *after = linear(
            q, k, v, g, state[names[0]], normalizer=z, eps=self.feature_map.eps, lengths=lengths
        )
        return o, dict(zip(names, after, strict=True))

    def _recur_long(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: dict[str, Tensor],
        position: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same with sums on two levels."""
        names = [spec.name for spec in self.state_specs()]
        o, *after = two_level(q, k, v, state[names[0]], state[names[1]], position, lengths=lengths)
        if self.config.normalize == "z":
            ones = torch.ones((*k.shape[:3], 1), dtype=state[names[2]].dtype, device=k.device)
            z, recent = (state[name][..., None] for name in names[2:])
            sums, *z_after = two_level(q, k, ones, z, recent, position, lengths=lengths)
            o = (o / (sums + self.feature_map.eps)).to(v.dtype)
            after += [part[..., 0] for part in z_after]
        return o, dict(zip(names, after, strict=True))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Outputs where every token sees all others."""
        obstacle = getattr(self.config, "export_obstacle", None)
        if is_exporting() and obstacle:
            raise EdgelinError(obstacle)
        normalize, eps = self.config.normalize == "z", self.feature_map.eps
        return bidirectional(q, k, v, normalize=normalize, eps=eps)
