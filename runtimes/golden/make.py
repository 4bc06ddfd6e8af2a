"""Make the golden bundles: tiny models with random weights, and what a runner must answer.

    python runtimes/golden/make.py [NAME ...]

writes ``runtimes/golden/NAME/``: ``bundle/``, and for every variant ``VARIANT.json`` and, where the
rows of a stream have one position, ``VARIANT.state``. "Golden streams" in ``runtimes/README.md``
describes them. Expected numbers are those of the Python runner; of an int8 or int4 graph with
MatMulNBits those with float activations, which all machines share. The bundles themselves are
compared with the model in float64 when they are exported.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgelin import checkpoint, tokenizer
from edgelin.config import FeatureConfig, ModelConfig
from edgelin.export.activations import float_activations
from edgelin.export.bundle import export_checkpoint
from edgelin.files import replacing
from edgelin.model import SequenceModel
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.sampler import Sampler, Sampling
from edgelin.runtimes.session import Bundle, open_session
from edgelin.runtimes.stream import Stream

FOLDER = Path(__file__).parent
VOCAB = 300
STEPS = 24  # greedy and sampled tokens
# Time of the calls: steps, a ragged chunk, a full one, and a step again.
TIMES = (1, 1, 5, 63, 64, 1)
RAGGED = ((5, (5, 0, 3)), (64, (64, 10, 1)), (1, (0, 1, 1)), (1, (1, 1, 1)))
SAMPLING = {
    "seed": 2**63 + 11,
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
}
PROMPT = "The quiet river runs past the old mill, naïve café: 日本語 🙂 and on"
CORPUS = (
    "The quiet river runs past the old mill. Grüße aus Köln, naïve café! 日本語 🙂🙃 0123456789\n"
)
# Float32 graphs may differ by their kernels' order of summation, times the largest output.
FLOAT32 = 1e-5
HEADS = {"num_heads": 2, "key_dim": 16, "value_dim": 24}
ATTENTION = {"type": "attention", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}


@dataclass(frozen=True)
class Golden:
    """One golden bundle.

    Args:
        mixers: Layers by name, as in a configuration; each is used once.
        hidden: Width of the model.
        profile: Profile of the export.
        quantise: Variants.
        features: Size and head of a model of features.
        streams: Whether calls have rows of different lengths.
        seed: Of the weights.
    """

    mixers: dict[str, dict[str, Any]]
    hidden: int = 32
    profile: str = "fused"
    quantise: tuple[str, ...] = ("none",)
    features: FeatureConfig | None = None
    streams: bool = False
    seed: int = 0


DELTA = {"type": "gated_deltanet", **HEADS}
LINEAR = {"type": "linear_attention", **HEADS}
MODELS = {
    "fused": Golden({"gdn": DELTA, "linear": LINEAR}, 64, quantise=("none", "int8", "int4")),
    "plain": Golden({"gdn": DELTA, "linear": LINEAR}, profile="plain"),
    "portable": Golden(
        {"gdn": DELTA, "linear": LINEAR}, 64, profile="plain", quantise=("portable",), seed=1
    ),
    "complex": Golden({"ssm": {"type": "ssm", "inner_size": 40, "state_size": 4}}),
    "hybrid": Golden({"gdn": DELTA, "local": {**ATTENTION, "window": 64}}),
    "growing": Golden({"linear": LINEAR, "full": {**ATTENTION, "window": 0}}),
    "features": Golden(
        {"gdn": DELTA},
        features=FeatureConfig(5, 3, "step", "classification", labels=("rest", "walk", "run")),
    ),
    "streams": Golden({"gdn": DELTA, "linear": LINEAR}, streams=True),
}


def main(names: list[str]) -> None:
    """Make the bundles of these names, or all."""
    torch.set_num_threads(1)
    for name in names or MODELS:
        make(name, MODELS[name], FOLDER / name)


def make(name: str, golden: Golden, folder: Path) -> None:
    """Export one bundle, replay it, and write what it answers."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "model"
        tokens = tokenizer.train([CORPUS * 3], VOCAB)
        text = None if golden.features else tokens.to_str()
        checkpoint.save(source, random_model(golden, tokens.get_vocab_size()), text)
        export_checkpoint(
            source,
            folder / "bundle",
            quantise=golden.quantise,
            profile=golden.profile,
            streams=golden.streams,
        )
    for variant in Bundle(folder / "bundle").manifest.variants:
        bundle = Bundle(folder / "bundle", variant=variant, threads=1)
        found = ragged(bundle) if golden.streams else single(bundle, folder)
        content = {"format": 1, "bundle": name, "variant": variant, **found}
        with replacing(folder / f"{variant}.json") as part:
            part.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def random_model(golden: Golden, vocab: int) -> SequenceModel:
    """A model with weights large enough that every layer matters."""
    torch.manual_seed(golden.seed)
    sizes: dict[str, Any] = {"features": golden.features} if golden.features else {}
    if not golden.features:
        sizes = {"vocab_size": vocab, "tie_word_embeddings": True}
    config = ModelConfig(
        hidden_size=golden.hidden,
        intermediate_size=3 * golden.hidden // 2,
        layers=tuple(golden.mixers),
        mixers=golden.mixers,
        **sizes,
    )
    model = SequenceModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(10)
        if golden.features:
            size = golden.features.size
            model.get_buffer("embedding.mean").copy_(10 * torch.randn(size))
            model.get_buffer("embedding.scale").copy_(torch.rand(size) + 0.1)
    return model


def single(bundle: Bundle, folder: Path) -> dict[str, Any]:
    """Calls of one row, and the greedy and sampled tokens after them."""
    rounded = rounds_activations(bundle)
    with exact(bundle) as reference:
        stream = reference.stream(capsule="none")
        calls = feed_calls(stream, prompt(bundle))
        stream.save(folder / f"{bundle.variant}.state")
        found: dict[str, Any] = {
            "batch": 1,
            "calls": calls,
            "state_file": f"{bundle.variant}.state",
        }
        if not bundle.manifest.output.task:
            found["text"] = {"prompt": PROMPT, "ids": bundle.text.encode(PROMPT)}
            found["greedy"] = generate(stream.fork(), {"temperature": 0})
            if not rounded:
                found["shorter"] = shorter_states(stream, folder / bundle.variant)
                found["sampled"] = {"settings": SAMPLING, **generate(stream, SAMPLING)}
    if rounded:
        found["tolerance"] = tolerance(calls, FLOAT32 * 10, kl_of(bundle, calls))
    else:
        found["tolerance"] = tolerance(calls, FLOAT32)
    return found


def rounds_activations(bundle: Bundle) -> bool:
    """Whether a graph's kernels round activations to 8 bits."""
    quantisation = bundle.manifest.variants[bundle.variant].quantisation
    return quantisation is not None and quantisation["operator"] == "MatMulNBits"


def shorter_states(stream: Stream, stem: Path) -> list[dict[str, Any]]:
    """The state in fewer bytes, and what follows it."""
    found = []
    for dtype in ("float16", "int8"):
        path, twin = stem.with_name(f"{stem.name}.{dtype}.state"), stream.fork()
        stream.save(path, dtype=dtype)
        twin.load(path)
        found.append({"state_file": path.name, "ids": [7], "outputs": [plain(twin.feed([7]))]})
    return found


def prompt(bundle: Bundle) -> list[Any]:
    """Steps for all calls: the prompt's tokens first, then any."""
    total, random = sum(TIMES), np.random.default_rng(7)
    steps = bundle.manifest.input.random(random, 1, total)[0].tolist()
    if bundle.manifest.output.task:
        return [[float(str(np.float32(10 * x))) for x in row] for row in steps]
    ids = bundle.text.encode(PROMPT)
    return (ids + [token or 1 for token in steps])[:total]


def feed_calls(stream: Stream, steps: list[Any]) -> list[dict[str, Any]]:
    """Feed the calls, and note the last outputs of each."""
    key = "ids" if isinstance(steps[0], int) else "features"
    calls, at = [], 0
    for time in TIMES:
        piece = steps[at : at + time]
        at += time
        calls.append({key: [piece], "outputs": [plain(stream.feed(piece))]})
    return calls


def generate(stream: Stream, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens that a sampler chooses, the last outputs, and the text."""
    sampler, ids = Sampler(Sampling(**settings)), []
    pieces = list(stream.fork().generate(max_tokens=STEPS, **settings))
    for _ in range(STEPS):
        assert stream.outputs is not None
        ids.append(sampler.choose(stream.outputs[0], stream.saved().text.recent, stream.position))
        stream.feed(ids[-1:])
    assert 0 not in ids and len(pieces) == STEPS, "the model ends its text; change its seed"
    return {"ids": ids, "pieces": pieces, "outputs": [plain(stream.outputs[0])]}


def ragged(bundle: Bundle) -> dict[str, Any]:
    """Calls of three rows of different lengths; every row is a stream of its own here."""
    random, rows = np.random.default_rng(7), [bundle.stream(capsule="none") for _ in range(3)]
    calls = []
    for time, lengths in RAGGED:
        ids = random.integers(1, bundle.manifest.output.size, (3, time))
        outputs = [
            plain(stream.feed(row[:length])) if length else None
            for stream, row, length in zip(rows, ids, lengths, strict=True)
        ]
        calls.append({"ids": ids.tolist(), "lengths": list(lengths), "outputs": outputs})
    return {"batch": 3, "calls": calls, "tolerance": tolerance(calls, FLOAT32)}


@contextmanager
def exact(bundle: Bundle) -> Iterator[Bundle]:
    """The bundle with float activations, where its matrices are rounded."""
    if not rounds_activations(bundle):
        yield bundle
        return
    other = Bundle(bundle.path, variant=bundle.variant, threads=1)
    file = bundle.manifest.variants[bundle.variant].file
    with float_activations(bundle.path / file) as graph:
        other.session = open_session(graph, 1, prepack=False)
    other.in_place = False
    yield other


def kl_of(bundle: Bundle, calls: list[dict[str, Any]]) -> float:
    """KL divergence in nat that rounded activations may cost after a call, on any machine."""
    found = feed_calls(bundle.stream(capsule="none"), [i for call in calls for i in call["ids"][0]])
    one, two = (np.array([call["outputs"][0] for call in c], np.float64) for c in (calls, found))
    return float(f"{4 * divergence(one, two).max():.2g}")


def tolerance(calls: list[dict[str, Any]], relative: float, kl: float | None = None) -> Any:
    """How far outputs may be away."""
    largest = max(abs(x) for call in calls for row in call["outputs"] if row for x in row)
    found = {"outputs": float(f"{relative * largest:.2g}")}
    return found if kl is None else {**found, "kl": kl}


def plain(outputs: Any) -> list[float]:
    """Float32 numbers in their shortest decimals."""
    return [float(str(x)) for x in outputs]


if __name__ == "__main__":
    main(sys.argv[1:])
