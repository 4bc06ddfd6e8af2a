"""The model: token embedding or feature projection, blocks of a mixer and an MLP, head.

    x = x + drop(mixer(norm(x)));  x = x + drop(mlp(norm(x)));  logits = norm(x) @ E^T

``forward(inputs, state) -> (outputs, state)`` is the only form: any T for training and prefill,
T = 1 for a step. All states are arguments and results, described by :meth:`state_specs`. A head for
whole sequences reads the mean of norm(x) over all steps so far, which is a state too.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.experts import Experts
from edgelin.layers import FeatureProjection, LayerNorm, RMSNorm, keep_last, running_mean
from edgelin.mixer_trial import check_apart, told, try_out
from edgelin.mixers import mlp
from edgelin.recurrences import packed
from edgelin.recurrences.lengths import masked
from edgelin.state import StateSpec

_INIT_STD = 0.02
_MOST_BYTES = 32 << 30  # a machine may tell of more memory than a container lets us have
_SURELY_FITS = 1 << 30  # numbers, 4 GiB
_BRANCHES = ("side", "mixer", "mlp")
_RESIDUAL_PROJECTIONS = ("out_proj", "down_proj")


class Block(nn.Module):
    """One layer: a mixer and what follows it, each normalised and added to the stream.

    A side branch may come first: the mixer reads what it gives with the stream, which goes on
    without it. It is given the stream as it is, and normalises that itself.

    Args:
        config: The model's sizes.
        layer: Index of the layer.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        if config.sides and config.sides[layer]:
            self.side = _branch(config, config.sides[layer], layer)
        self.mixer: Any = _branch(config, config.layers[layer], layer)
        after = config.mlps[layer] if config.mlps else ""
        if after:
            self.mlp = _branch(config, after, layer)
        elif config.intermediate_size and not config.mlps:
            gated = mlp.Config(config.intermediate_size)
            self.mlp = mlp.Mixer(gated, config.hidden_size, layer, config.rms_norm_eps)
        place = config.norm_places[layer] if config.norm_places else "before"
        self.normalises_stream = place == "stream"
        for name, _ in self._named():
            if name != "side" and place != "after":
                setattr(self, f"{name}_norm", norm(config))
            if name != "side" and place in ("after", "both"):
                setattr(self, f"{name}_post_norm", norm(config))
        self.dropout = nn.Dropout(config.dropout)

    def branches(self) -> list[Any]:
        """The side branch, the mixer and what follows it, as far as there are such."""
        return [branch for _, branch in self._named()]

    def state_specs(self) -> list[StateSpec]:
        """The states of all branches."""
        return [spec for branch in self.branches() for spec in branch.state_specs()]

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor],
        position: Tensor,
        shared: dict[str, Tensor],
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Map the stream `[B, T, d]` with this layer's states and what the call shares."""
        after: dict[str, Tensor] = {}
        ragged = {} if lengths is None else {"lengths": lengths}
        read = x
        for name, branch in self._named():
            before, behind = (getattr(self, f"{name}_{k}", None) for k in ("norm", "post_norm"))
            extra = (shared,) if getattr(branch, "shares", False) else ()
            own = {spec.name: state[spec.name] for spec in branch.state_specs()}
            normed = before(read) if before else read
            y, own = branch(normed, own, position, *extra, **ragged)
            after |= own
            if name == "side":
                read = x + y
                continue
            x = normed if self.normalises_stream else x
            read = x = x + self.dropout(behind(y) if behind else y)
        return x, after

    def _named(self) -> list[tuple[str, Any]]:
        """The branches by name, in order."""
        return [(name, getattr(self, name)) for name in _BRANCHES if hasattr(self, name)]


def norm(config: ModelConfig) -> nn.Module:
    """A norm of the stream."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size, config.rms_norm_eps)


def _branch(config: ModelConfig, name: str, layer: int) -> nn.Module:
    """The module of a table among the mixers."""
    where = f"model.mixers.{name}"
    eps, hidden = config.rms_norm_eps, config.hidden_size
    return mixers.build(config.mixers[name], hidden, layer, eps, where=where)


def check_size(config: ModelConfig, *, bytes_each: int = 4, memory: int | None = None) -> None:
    """Refuse a model whose parameters (and state, of one row) don't fit memory, before making it.

    Args:
        config: The model.
        bytes_each: Bytes a parameter takes.
        memory: Bytes there are; None: those of this machine, at most
            those of 2^33 parameters.

    Raises:
        EdgelinError: It does not fit, or a mixer's table is wrong.
    """
    mixers.check(config)
    numbers = config.vocab_size * config.hidden_size * (2 - config.tie_word_embeddings)
    if config.features is not None:
        numbers = (config.features.size + config.features.outputs + 2) * config.hidden_size
    if memory is None and numbers + _most_in_blocks(config) < _SURELY_FITS:
        return  # torch takes seconds to load what counts without memory
    with torch.device("meta"):  # sizes without memory
        blocks = _blocks(config)
    numbers += sum(p.numel() for p in blocks.parameters())
    specs = [spec for block in cast(list[Block], list(blocks)) for spec in block.state_specs()]
    numbers += sum(math.prod(spec.sized()) for spec in specs)
    memory = memory or min(_machine_memory(), _MOST_BYTES * bytes_each // 4)
    if numbers * bytes_each > memory:
        raise EdgelinError(
            f"the model has {numbers:,} parameters and state values, which take "
            f"{numbers * bytes_each / 2**30:,.1f} GiB of memory; allowed are "
            f"{memory / 2**30:,.1f} GiB; lower model.hidden_size, model.vocab_size, "
            f"the number of layers or the mixers' sizes"
        )


def _most_in_blocks(config: ModelConfig) -> int:
    """More numbers than the blocks can have: every size of a mixer multiplied with every other."""
    total = 0
    for name in filter(None, (*config.layers, *config.mlps, *config.sides)):
        _, own = mixers.read_config(config.mixers[name], where=f"model.mixers.{name}")
        for part in [own, *(own.configs() if hasattr(own, "configs") else ())]:
            sizes = [v for v in dataclasses.asdict(part).values() if isinstance(v, int)]
            total += config.hidden_size * math.prod(max(4, size) for size in sizes)
        total += config.hidden_size * (3 * config.intermediate_size + config.hidden_size)
    return total


def _blocks(config: ModelConfig) -> nn.ModuleList:
    """The layers; each may take weights of those before it, and gives its own copy up at once."""
    blocks, earlier = nn.ModuleList(), list[nn.Module]()
    for layer in range(len(config.layers)):
        block = Block(config, layer)
        for branch in block.branches():
            if getattr(branch, "shares", False):
                with told(f"{type(branch).__module__}.Mixer.follow"):
                    branch.follow(earlier)
            earlier.append(branch)
        blocks.append(block)
    return blocks


def _machine_memory() -> int:
    """Bytes of memory of this machine; 64 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 64 << 30


class SequenceModel(nn.Module):
    """A causal model of token or feature streams with a state of fixed size.

    Args:
        config: Sizes and the mixer of every layer.

    Raises:
        EdgelinError: A mixer's table is wrong, a mixer from outside fails its trial
            (:mod:`edgelin.mixer_trial`), or the model does not fit memory.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_size(config)
        self.config = config
        if config.features is None:
            self.embedding: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.embedding = FeatureProjection(config.features.size, config.hidden_size)
        self.blocks = _blocks(config)
        if config.embedding_norm:
            self.embedding_norm = norm(config)
        self.norm: Any = norm(config)
        if config.features is not None:
            self.head = nn.Linear(config.hidden_size, config.features.outputs)
        elif not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        check_apart(self._branches())
        self._initialise()
        for branch in self._branches():
            try_out(branch, config.hidden_size)

    def state_specs(self) -> list[StateSpec]:
        """Every state, in layer order; then ``pool`` and ``position`` if something needs them."""
        specs = [spec for block in self._layers() for spec in block.state_specs()]
        if self._pools:
            specs.append(StateSpec("pool", None, (self.config.hidden_size,), "batch channels"))
        if self._pools or any(
            getattr(branch, "needs_position", False) for branch in self._branches()
        ):
            specs.append(StateSpec("position", None, (), "batch", dtype="int64", initial=0))
        return specs

    def initial_state(
        self, batch: int, device: torch.device | str | None = None
    ) -> dict[str, Tensor]:
        """The states before the first token, float64 where the weights are.

        Args:
            batch: Rows B.
            device: Where to make them; None: where the weights are.
        """
        weight = self.norm.weight
        state = {}
        for spec in self.state_specs():
            dtype = getattr(torch, spec.dtype)
            if dtype.is_floating_point:
                dtype = torch.promote_types(dtype, weight.dtype)
            state[spec.name] = torch.full(
                (batch, *spec.sized()), spec.initial, dtype=dtype, device=device or weight.device
            )
        return state

    def forward(
        self,
        inputs: Tensor,
        state: dict[str, Tensor] | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Predict the next token, or answer, at every position.

        Args:
            inputs: `[B, T]` int64 tokens, or `[B, T, F]` features.
            state: The states before the first of them; None: the initial ones.
            lengths: `[B]` int64, steps 0 .. T that each row really has; None: all. What stands
                behind the end of a row leaves its states as they are; outputs there mean nothing.
            cu_seqlens: `[N + 1]` int32 or int64, ends of N sequences that stand one after the other
                in the only row of ``inputs``, each with its own row of the states, or None; as
                :mod:`edgelin.recurrences.packed` says.

        Returns:
            outputs: `[B, T, vocab]` logits, or `[B, T, outputs]`, float32.
            state: The states after the last step, keyed as ``state_specs`` says.
        """
        hidden, state = self.hidden(inputs, state, lengths, cu_seqlens)
        return self.logits(hidden), state

    def hidden(
        self,
        inputs: Tensor,
        state: dict[str, Tensor] | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As :meth:`forward`, but the stream `[B, T, d]` that :meth:`logits` takes."""
        if cu_seqlens is not None:
            return self._packed(inputs, state, cu_seqlens, lengths)
        batch, time = inputs.shape[:2]
        if state is None:
            state = self.initial_state(batch, inputs.device)
        position = state.get("position")
        if position is None:
            position = inputs.new_zeros(batch, dtype=torch.int64)
        # Zeros behind the end of a row: nothing that stands there is seen, not even a NaN.
        x = masked(self.embedding(inputs), lengths)
        if self.config.embedding_norm:
            x = self.embedding_norm(x)
        after: dict[str, Tensor] = {}
        shared = {"embedding": x}
        for block in self._layers():
            x, own = block(x, state, position, shared, lengths)
            after |= own
        if self._pools:
            x, after["pool"] = running_mean(self.norm(x), state["pool"], position, lengths)
        if "position" in state:
            after["position"] = position + (time if lengths is None else lengths)
        kept = keep_last(x, lengths)
        return kept if self._pools else self.norm(kept), after

    def _packed(
        self,
        inputs: Tensor,
        state: dict[str, Tensor] | None,
        cu_seqlens: Tensor,
        lengths: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """:meth:`hidden` of packed sequences, as rows of different lengths for all layers at once:
        no mixer knows more than ``lengths``, and what is not a recurrence is masked by them too."""
        for spec in self.state_specs():
            if spec.growing_axis is not None:
                raise EdgelinError(
                    f"cu_seqlens needs states of fixed size; layer {spec.layer} attends to all "
                    f"tokens; give its attention a window, or every sequence a call of its own"
                )
        if state is None:
            state = self.initial_state(max(0, cu_seqlens.numel() - 1), inputs.device)
        names = list(state)

        def call(
            inputs: Tensor, states: list[Tensor], lengths: Tensor | None
        ) -> tuple[Tensor, list[Tensor]]:
            hidden, after = self.hidden(inputs, dict(zip(names, states, strict=True)), lengths)
            return hidden, [after[name] for name in names]

        hidden, after = packed.run_all(call, (inputs,), list(state.values()), cu_seqlens, lengths)
        return hidden, dict(zip(names, after, strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: `[..., d]` from :meth:`hidden` to `[..., outputs]`, float32 (or float64)."""
        features = self.config.features is not None
        logits = self.head(hidden) if features else F.linear(hidden, self.head_weight)
        return self.capped(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    def capped(self, logits: Tensor) -> Tensor:
        """Logits within the bound that the config sets, if any."""
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @property
    def head_weight(self) -> Tensor:
        """`[outputs, d]` weight of the head: the embedding's where they are tied."""
        tied = self.config.tie_word_embeddings and self.config.features is None
        weight: Tensor = (self.embedding if tied else self.head).weight  # type: ignore[assignment]
        return weight

    def num_parameters(self) -> int:
        """Trainable numbers; a tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def _pools(self) -> bool:
        """Whether the head reads the mean over all steps so far."""
        features = self.config.features
        return features is not None and features.head == "sequence"

    def _layers(self) -> list[Block]:
        """The blocks with their type, which ModuleList forgets."""
        return cast(list[Block], list(self.blocks))

    def _branches(self) -> list[Any]:
        """All branches, in order."""
        return [branch for block in self._layers() for branch in block.branches()]

    def _initialise(self) -> None:
        """Normal weights of std 0.02, residual projections by 1 / sqrt(2 L) less (GPT-2)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.rpartition(".")[2] in _RESIDUAL_PROJECTIONS
                depth = 2 * len(self.config.layers) if residual else 1
                nn.init.normal_(module.weight, std=_INIT_STD / depth**0.5)
            if isinstance(module, Experts):
                depth = 2 * len(self.config.layers)
                module.reset_parameters(_INIT_STD, _INIT_STD / depth**0.5)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(self.embedding, FeatureProjection):
            self.embedding.reset_parameters()
        for branch in self._branches():
            if hasattr(branch, "reset_parameters"):
                with told(f"{type(branch).__module__}.Mixer.reset_parameters"):
                    branch.reset_parameters()
