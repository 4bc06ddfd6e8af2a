"""A quantised variant with float activations, and what rounded ones must do to its model.

Both take the place of a fixed limit: see :mod:`edgelin.export.activations`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgelin.export.activations import float_activations
from edgelin.export.verify.forms import Array, OnnxForm, Record, State, compare, replay
from edgelin.export.verify.report import TRUTH, Comparison
from edgelin.export.verify.torch_forms import TorchForm
from edgelin.export.verify.weights import block_sizes
from edgelin.runtimes.session import open_session

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

_STEPS = 8  # fed one by one: kernels with float activations are slow


def float_forms(
    bundle: Bundle,
    steps: Array,
    state: State,
    truth: Record,
    *,
    lengths: Sequence[int],
    tolerance: float,
) -> list[Comparison]:
    """Steps and chunks of a quantised variant with float activations, beside its own truth.

    Args:
        bundle: The opened variant.
        steps: ``[B, T, ...]``, as long as the longest run.
        state: Before the first step.
        truth: The recurrence in float64 with the variant's weights.
        lengths: Of the runs in chunks.
        tolerance: Largest relative error.
    """
    name, own = bundle.variant, copy.copy(bundle)
    with float_activations(bundle.path / bundle.manifest.variants[name].file) as graph:
        own.session, own.in_place = open_session(graph, bundle.threads, prepack=False), False
    graph_form = OnnxForm(own, len(steps))
    single = replay(graph_form, steps[:, :_STEPS], state, size=1)
    chunks = [
        difference
        for length in lengths
        for difference in compare(
            replay(graph_form, steps[:, :length], state, size=bundle.manifest.chunk), truth, length
        )
    ]
    differences = {"steps": compare(single, truth, _STEPS), "chunks": chunks}
    return [
        Comparison(name, f"{form} (float activations)", TRUTH, tolerance, found)
        for form, found in differences.items()
    ]


def rounding_noise(
    checkpoint: Path,
    rounded: dict[str, Array],
    bundle: Bundle,
    steps: Array,
    state: State,
    truth: Record,
) -> float:
    """The largest error of a model in torch that rounds activations as the variant does.

    Args:
        checkpoint: What the variant was exported from.
        rounded: The variant's weights.
        bundle: The opened variant.
        steps: ``[B, T, ...]``.
        state: Before the first step.
        truth: The recurrence in float64 with the same weights.
    """
    graph = bundle.path / bundle.manifest.variants[bundle.variant].file
    form = TorchForm(
        checkpoint, sequential=False, weights=rounded, blocks=block_sizes(graph, rounded)
    )
    seen = {form.output, *state}  # a graph does not show the stream between blocks
    record = {k: v for k, v in replay(form, steps, state, size=1).items() if k in seen}
    return max(difference.error for difference in compare(record, truth, steps.shape[1]))
