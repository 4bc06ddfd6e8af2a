"""Quantised variants beside the float model: on a text, on sequences of features, or on neither.

Without data a language model writes a text itself, and a model of features reads the golden stream.
Distributions are compared by their Kullback-Leibler divergence, the numbers of a regression by
``rms(x - y) / rms(y - mean(y))``, which a constant offset of all answers cannot make look small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from edgelin.errors import EdgelinError
from edgelin.export.verify.forms import Array, Form, OnnxForm, State, replay
from edgelin.export.verify.golden import golden_steps
from edgelin.export.verify.report import Quality
from edgelin.runtimes.buffers import initial_state
from edgelin.runtimes.distribution import deviation, divergence, log_softmax
from edgelin.sequences import Sequences

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

KL_LIMITS = {8: 0.01, 4: 0.06}  # nat, mean over a text or over features
# Small trained models are off by 0.01 and 0.03 on random features, by a third of that on data.
REGRESSION_LIMITS = {8: 0.05, 4: 0.1}
TEXT_TOKENS = 2048  # read of a given text
WRITTEN_TOKENS = 256
_SEED = 20


def bits(bundle: Bundle) -> int | None:
    """Bits of a quantised variant's weights; None for a float one."""
    quantisation = bundle.manifest.variants[bundle.variant].quantisation
    return None if quantisation is None else int(quantisation["bits"])


def qualities(
    opened: dict[str, Bundle], form: Form, label: str, data: str | Sequences | None
) -> list[Quality]:
    """Compare every quantised variant with the float model.

    Args:
        opened: Variants by name.
        form: The float model.
        label: Its name.
        data: A text, or sequences of features; None: what the module's docstring says.

    Raises:
        EdgelinError: The text is empty.
    """
    quantised = {name: bundle for name, bundle in opened.items() if bits(bundle) is not None}
    first = next(iter(quantised.values()))
    start = {spec.name: initial_state(spec, 1) for spec in first.manifest.states}
    pieces = list(_pieces(first, form, start, data))
    last_only = isinstance(data, Sequences) and first.manifest.output.head == "sequence"
    wanted = _answers(form, first, start, pieces, last_only=last_only)
    found = []
    for name, bundle in quantised.items():
        answers = _answers(OnnxForm(bundle, 1), bundle, start, pieces, last_only=last_only)
        found.append(_quality(bundle, name, label, wanted, answers))
    return found


def _pieces(
    bundle: Bundle, form: Form, start: State, data: str | Sequences | None
) -> Iterable[Array]:
    """Sequences [1, T, ...] that are read each from the initial state."""
    tokenizer = bundle.manifest.tokenizer
    if isinstance(data, Sequences):
        return (sequence[None] for sequence in data)
    if tokenizer is None and data is None:
        return [golden_steps(bundle.manifest, bundle.path)]
    if data is None and tokenizer is not None:
        return [_write_text(form, start, tokenizer.eos_token_id)]
    ids = np.array([bundle.text.encode(data or "")[:TEXT_TOKENS]])
    if ids.size == 0:
        raise EdgelinError("the text is empty; give one with at least a few hundred words")
    return [ids]


def _answers(
    form: Form, bundle: Bundle, start: State, pieces: list[Array], *, last_only: bool
) -> Array:
    """Outputs [N, size] at every position, or after the last of every piece."""
    name, rows = bundle.manifest.output.name, []
    for piece in pieces:
        record = replay(form, piece, start, size=bundle.manifest.chunk)[name]
        found = np.concatenate([*record.values()])
        rows.append(found[-1:] if last_only else found)
    return np.concatenate(rows)


def _quality(bundle: Bundle, name: str, label: str, wanted: Array, found: Array) -> Quality:
    """The distance of a variant's answers from the float model's."""
    width, output = bits(bundle) or 8, bundle.manifest.output
    unit = bundle.manifest.input.unit
    if not output.is_distribution:
        error = deviation(wanted, found)
        return Quality(
            name, label, unit, len(wanted), REGRESSION_LIMITS[width], relative_error=error
        )
    return Quality(
        name,
        label,
        unit,
        len(wanted),
        max(KL_LIMITS[width], _budget(bundle)),
        kl=float(divergence(wanted, found).mean()),
        top1=float((wanted.argmax(-1) == found.argmax(-1)).mean()),
    )


def _budget(bundle: Bundle) -> float:
    """Nat that a variant was exported to cost at most, on another text: twice that; or 0."""
    quantisation = bundle.manifest.variants[bundle.variant].quantisation or {}
    return 2 * float(quantisation.get("budget_kl", 0))


def _write_text(form: Form, state: State, first: int) -> Array:
    """Draw a text from a model at temperature 1, ids [1, T]."""
    random = np.random.default_rng(_SEED)
    ids = [first]
    while len(ids) < WRITTEN_TOKENS:
        sequences, state = form(np.array([ids[-1:]]), state)
        cumulative = np.exp(log_softmax(sequences["logits"][0, 0])).cumsum()
        ids.append(int(np.searchsorted(cumulative, random.uniform(0, cumulative[-1]))))
    return np.array([ids])
