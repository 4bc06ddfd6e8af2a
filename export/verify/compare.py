"""Compare every form of a model with its recurrence, and the graphs of a bundle with each other.

The truth is the model in float64, fed step by step, with each recurrence computed by its
``reference.py``. Beside it stand the parallel form in torch (Triton kernels on a CUDA GPU, chunked
elsewhere) and the ONNX graphs, fed step by step, in chunks, and in calls of random lengths, as
three rows and as one. All start from one random state, so that what a form does with its state
counts from the first token. Where the states allow it, the parallel form also reads rows of
different lengths in one call. And every state must matter (:mod:`edgelin.export.verify.probe`).

Per position and tensor (outputs, the stream after each block, every state), the error of x beside
the truth y is max|x - y| / max|y|. A quantised graph is another model: its truth is the
recurrence with the rounded weights. With float activations it has to be as near to that as a float
graph; with its rounded ones, no further than a model in torch that rounds them too
(:mod:`edgelin.export.verify.activations`). Its answers are held to the float model's
(:mod:`edgelin.export.verify.quality`).
The graphs do not show the stream between blocks; an error there shows in the next layer's states.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgelin.errors import EdgelinError
from edgelin.export.limits import allowed
from edgelin.export.verify.forms import (
    Array,
    Form,
    OnnxForm,
    Record,
    State,
    compare,
    first_row,
    replay,
    replay_calls,
)
from edgelin.export.verify.golden import allowed_error, golden_steps, replay_golden
from edgelin.export.verify.inputs import BATCH, random_state, random_steps
from edgelin.export.verify.probe import sensitivity
from edgelin.export.verify.quality import bits, qualities
from edgelin.export.verify.report import (
    TOLERANCE,
    TRUTH,
    Comparison,
    Difference,
    Verification,
)
from edgelin.export.verify.streams import ragged_rows
from edgelin.runtimes import load as open_bundle
from edgelin.runtimes.manifest import HASH_LIMIT, FileRecord, Manifest
from edgelin.sequences import Sequences

if TYPE_CHECKING:
    from edgelin.export.verify.torch_forms import TorchForm
    from edgelin.runtimes.session import Bundle

LENGTHS = (1, 63, 64, 65, 130)  # one token; around one chunk; into the third
# What rounded activations may change, times what they change of the model in torch: the largest of
# many errors, of two draws of the same noise. The noise also parts chunks from steps, which round
# otherwise after the first difference in the last bit of a float.
_ROOM = 2.0
_RAGGED = (1, 65, 130)  # lengths of the rows of one call in torch
_SPLITS = 2  # random ones of the longest sequence
_SEED = 20


def verify(
    bundle: Path,
    checkpoint: Path | None = None,
    *,
    tolerance: float | None = None,
    data: str | Sequences | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compare all variants of a bundle with its checkpoint, or with themselves without one.

    Args:
        bundle: Folder written by ``edgelin export``; its hashes and golden streams are checked too.
        checkpoint: The checkpoint it was made from.
        tolerance: Largest relative error of a float form; None: ``TOLERANCE``, or where float32
            alone does more to the model, :func:`edgelin.export.limits.allowed`.
        data: Text or sequences of features that quantised variants are compared on; None: a text
            that the float model writes, or the golden stream.
        progress: Is told what is being done, a line at a time.

    Raises:
        EdgelinError: The bundle is damaged, or was not made from this checkpoint.
    """
    manifest = Manifest.read(bundle)
    _check_files(manifest, bundle)
    with contextlib.ExitStack() as stack:
        own = None
        if checkpoint is not None:
            from edgelin.export.verify.manifest import check_contract, check_same_model

            own = stack.enter_context(exported(checkpoint, bundle))
            check_same_model(manifest, own, checkpoint)
            check_contract(manifest, bundle, own, checkpoint)
        result = _verify(manifest, bundle, own, tolerance, data, progress)
    result.checkpoint = None if checkpoint is None else str(checkpoint)
    return result


@contextlib.contextmanager
def exported(checkpoint: Path, bundle: Path) -> Iterator[Path]:
    """The checkpoint, in our own format and with the attention that the bundle was given."""
    from edgelin.export import attention
    from edgelin.families import convert

    with (
        convert.own(checkpoint) as own,
        attention.applied(own, attention.chosen(own, bundle)) as used,
    ):
        yield used


def _verify(
    manifest: Manifest,
    bundle: Path,
    checkpoint: Path | None,
    tolerance: float | None,
    data: str | Sequences | None,
    progress: Callable[[str], None],
) -> Verification:
    """:func:`verify` with the checkpoint as it was exported."""
    result = Verification(str(bundle), None if checkpoint is None else str(checkpoint))
    result.notes.append("file hashes and golden streams are right")
    random = np.random.default_rng(_SEED)
    steps = random_steps(manifest, bundle, max(LENGTHS), random)
    state = random_state(manifest, bundle, random)
    other = random_state(manifest, bundle, np.random.default_rng(_SEED + 1))
    own = None
    if checkpoint is None:
        result.notes.append(
            "the graphs were not compared with the model in torch; give --checkpoint"
        )
    else:
        progress("weights beside the checkpoint's")
        weights = _checked_weights(manifest, bundle, checkpoint)
        result.notes.append("the weights of every variant are the checkpoint's")
        progress("recurrence, step by step in float64")
        own = _Own(checkpoint, weights, steps, state, tolerance)
        result.comparisons += own.torch_forms()
    opened = {}
    for name in manifest.variants:
        progress(f"{name}: steps and chunks")
        opened[name] = open_bundle(bundle, variant=name)
        replay_golden(opened[name])
        if own is None:
            limit = _limit_alone(opened[name], tolerance)
            found = _graph_forms(opened[name], steps, state, None, limit)
        else:
            found, limit = own.variant(opened[name], progress)
        result.comparisons += found
        result.probes.append(sensitivity(opened[name], steps, state, other, limit))
    _qualities(opened, checkpoint, data, result)
    return result


def _limit_alone(bundle: Bundle, tolerance: float | None) -> float:
    """How far the forms of a variant may be apart where there is no model in torch."""
    if bits(bundle) is None and tolerance is not None:
        return tolerance
    return max(tolerance or TOLERANCE, allowed_error(bundle))


class _Own:
    """The forms of a checkpoint and its graphs, each beside the recurrence with its weights.

    Args:
        checkpoint: As it was exported.
        weights: Its parameters.
        steps: ``[B, T, ...]``.
        state: Before the first step.
        tolerance: As of :func:`verify`.
    """

    def __init__(
        self,
        checkpoint: Path,
        weights: dict[str, Array],
        steps: Array,
        state: State,
        tolerance: float | None,
    ) -> None:
        self._checkpoint, self._weights = checkpoint, weights
        self._steps, self._state = steps, state
        self._limit = TOLERANCE if tolerance is None else tolerance
        self._is_strict = tolerance is not None
        self._truth = self._recurrence(None)

    def _recurrence(self, rounded: dict[str, Array] | None) -> Record:
        """The truth, of the model or of one with rounded weights."""
        from edgelin.export.verify.torch_forms import TorchForm

        form = TorchForm(self._checkpoint, sequential=True, weights=rounded)
        return replay(form, self._steps, self._state, size=1)

    def torch_forms(self) -> list[Comparison]:
        """The parallel form, also in a call of rows of different lengths."""
        found = _torch_forms(self._checkpoint, self._steps, self._state, self._truth, self._limit)
        return self._with_room(found, self._truth, None)

    def variant(
        self, bundle: Bundle, progress: Callable[[str], None]
    ) -> tuple[list[Comparison], float]:
        """The forms of a graph, and how far they may be apart."""
        truth, rounded, limit = self._truth, None, self._limit
        found: list[Comparison] = []
        if bits(bundle) is not None:
            from edgelin.export.verify.activations import float_forms, rounding_noise
            from edgelin.export.verify.weights import rounded_weights

            progress(f"{bundle.variant}: recurrence with its rounded weights, in float64")
            graph = bundle.path / bundle.manifest.variants[bundle.variant].file
            rounded = rounded_weights(graph, self._weights)
            truth = self._recurrence(rounded)
            given = bundle, self._steps, self._state, truth
            found += float_forms(*given, lengths=LENGTHS, tolerance=limit)
            limit += _ROOM * rounding_noise(self._checkpoint, rounded, *given)
        found += _graph_forms(bundle, self._steps, self._state, truth, limit)
        return self._with_room(found, truth, rounded), limit

    def _with_room(
        self, found: list[Comparison], truth: Record, rounded: dict[str, Array] | None
    ) -> list[Comparison]:
        """With limits that float32 can meet, if it was that which missed them."""
        if self._is_strict or all(comparison.passed for comparison in found):
            return found
        from edgelin.export.verify.torch_forms import float32_noise

        noise = float32_noise(self._checkpoint, self._steps, self._state, truth, rounded)
        more = allowed(self._limit, noise) - self._limit
        return [dataclasses.replace(one, tolerance=one.tolerance + more) for one in found]


def _check_files(manifest: Manifest, bundle: Path) -> None:
    """Hash every file of every variant, also those that are too large to hash at every start."""
    for name, variant in manifest.variants.items():
        manifest.check_files(bundle, name)
        for file, record in variant.files.items():
            if record.bytes > HASH_LIMIT and FileRecord.of(bundle / file) != record:
                raise EdgelinError(
                    f"{bundle / file} differs from its sha256 in the manifest; "
                    "take the original, or export again"
                )
            if (bundle / file).resolve().parent != (bundle / variant.file).resolve().parent:
                raise EdgelinError(
                    f"{bundle / file} is a link to another folder, which onnxruntime does not "
                    "follow; put the file itself there"
                )


def _checked_weights(manifest: Manifest, bundle: Path, checkpoint: Path) -> dict[str, Array]:
    """The checkpoint's parameters; a variant that holds other ones is refused."""
    from edgelin.export.quantise.gptq import MOST_CODES
    from edgelin.export.verify.weights import (
        check_formats,
        check_weights,
        computed_constants,
        read_weights,
    )

    weights = read_weights(checkpoint)
    lengths = manifest.lengths is not None
    rebuild = cache(partial(computed_constants, checkpoint, manifest.profile, lengths=lengths))
    for variant in manifest.variants.values():
        calibrated = (variant.quantisation or {}).get("method") == "gptq"
        moved = MOST_CODES if calibrated else 0
        check_weights(bundle / variant.file, weights, rebuild, most_codes=moved)
        check_formats(bundle / variant.file, weights, variant.quantisation)
    return weights


def _torch_forms(
    checkpoint: Path, steps: Array, state: State, truth: Record, tolerance: float
) -> list[Comparison]:
    """The parallel form beside the truth, also in a call of rows of different lengths."""
    from edgelin.export.verify.torch_forms import TorchForm

    parallel = TorchForm(checkpoint, sequential=False)
    differences = []
    for length in LENGTHS:
        record = replay(parallel, steps[:, :length], state, size=length)
        differences += compare(record, truth, length)
    form = f"parallel ({'Triton' if parallel.device == 'cuda' else 'chunked'})"
    found = [Comparison(None, form, TRUTH, tolerance, differences)]
    if not any(spec.growing_axis for spec in parallel.model.state_specs()):
        ragged = _ragged(parallel, steps, state, truth)
        found.append(Comparison(None, f"{form}, ragged", TRUTH, tolerance, ragged))
    return found


def _ragged(form: TorchForm, steps: Array, state: State, truth: Record) -> list[Difference]:
    """Rows of different lengths in one call: outputs up to each end, and the states there."""
    sequences, after = form(steps, state, np.array(_RAGGED))
    found = []
    for row, length in enumerate(_RAGGED):
        own: Record = {name: {length - 1: x[row : row + 1]} for name, x in after.items()}
        for name, values in sequences.items():
            own[name] = {t: values[row : row + 1, t] for t in range(length)}
        wanted = {k: {t: x[row : row + 1] for t, x in truth[k].items()} for k in own}
        found += compare(own, wanted, length)
    return found


def _graph_forms(
    bundle: Bundle, steps: Array, state: State, truth: Record | None, tolerance: float
) -> list[Comparison]:
    """Steps, chunks and ragged calls of one variant, beside its truth if there is one."""
    form, name = OnnxForm(bundle, BATCH), bundle.variant
    single = replay(form, steps, state, size=1)
    longest = max(LENGTHS)
    runs = {
        length: replay(form, steps[:, :length], state, size=bundle.manifest.chunk)
        for length in LENGTHS
    }

    def chunks_beside(other: Record) -> list[Difference]:
        return [d for length, run in runs.items() for d in compare(run, other, length)]

    def split(other: Record) -> list[Difference]:
        return _random_calls(bundle, steps, state, other)

    ragged = ragged_rows(bundle, golden_steps(bundle.manifest, bundle.path)[0], tolerance)
    streams = [] if ragged is None else [ragged]
    beside_steps = Comparison(name, "chunks", "its steps", tolerance, chunks_beside(single))
    if truth is None:
        return [
            beside_steps,
            Comparison(name, "random calls", "its steps", tolerance, split(single)),
            *streams,
        ]
    beside_truth = [
        Comparison(name, "steps", TRUTH, tolerance, compare(single, truth, longest)),
        Comparison(name, "chunks", TRUTH, tolerance, chunks_beside(truth)),
        Comparison(name, "random calls", TRUTH, tolerance, split(truth)),
    ]
    alone = [] if bits(bundle) is None else [beside_steps]
    return [*beside_truth, *alone, *streams]


def _random_calls(bundle: Bundle, steps: Array, state: State, truth: Record) -> list[Difference]:
    """Calls of random lengths, of all rows and of the first alone, beside a record."""
    random = np.random.default_rng(_SEED)
    one = {name: array[:1] for name, array in state.items()}
    found = []
    for _ in range(_SPLITS):
        for rows, start, wanted in ((steps, state, truth), (steps[:1], one, first_row(truth))):
            calls = random_calls(random, steps.shape[1], bundle.manifest.chunk)
            record = replay_calls(OnnxForm(bundle, len(rows)), rows, start, calls)
            found += compare(record, wanted, steps.shape[1])
    return found


def random_calls(random: np.random.Generator, time: int, chunk: int) -> list[int]:
    """Lengths of calls, 1 .. chunk and short ones as likely as long ones, ``time`` together."""
    calls: list[int] = []
    while (left := time - sum(calls)) > 0:
        length = round(chunk ** random.uniform())
        calls.append(min(length, left))
    return calls


def _qualities(
    opened: dict[str, Bundle],
    checkpoint: Path | None,
    data: str | Sequences | None,
    result: Verification,
) -> None:
    """Every quantised variant beside the float model, if there is one."""
    quantised = [name for name, bundle in opened.items() if bits(bundle) is not None]
    if not quantised:
        return
    form, label = _float_form(opened, checkpoint)
    if form is None:
        result.notes.append(
            f"{', '.join(quantised)}: not compared with the float model, which the bundle lacks; "
            "give --checkpoint"
        )
        return
    result.qualities += qualities(opened, form, label, data)


def _float_form(opened: dict[str, Bundle], checkpoint: Path | None) -> tuple[Form | None, str]:
    """The float model, from the bundle if it has it, and its name."""
    for name, bundle in opened.items():
        if bits(bundle) is None:
            return OnnxForm(bundle, 1), name
    if checkpoint is None:
        return None, ""
    from edgelin.export.verify.torch_forms import TorchForm

    return TorchForm(checkpoint, sequential=False), "the float model in torch"
