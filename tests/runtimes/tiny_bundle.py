"""A small but real stateful bundle, built by hand so that these tests need no exporter.

The model: e = E[id], or e = x E of features x;  S_t = a * S_{t-1} + k_t v_t^T with k = e Wk and
v = e Wv;  o_t = q_t^T S_t with q = e Wq;  logits = (o_t Wo + e) Wh.  It carries S as
``recurrent.0`` and ``position``.
:func:`reference` is the same in float64 numpy, one token at a time.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgelin.runtimes.manifest import METADATA_KEY, Manifest, Variant, file_records
from edgelin.runtimes.signature import Features, Output, Tokens
from edgelin.runtimes.tokenizer_record import TokenizerRecord
from edgelin.state import StateSpec

CHUNK = 8
FEATURES = 5  # numbers of a step of the bundle for features
WIDTH, KEY, VALUE, DECAY = 16, 6, 10, 0.9
STATES = [
    StateSpec("recurrent", 0, (KEY, VALUE), "batch key value", initial=0.25),
    StateSpec("position", None, (), "batch", dtype="int64"),
]
CORPUS = (
    "The quiet river runs past the old mill. Grüße aus Köln, naïve café! 日本語 🙂🙃 0123456789\n"
)


@dataclass
class Tiny:
    """A written bundle with what the tests compare it to."""

    path: Path
    weights: dict[str, NDArray[np.float32]]
    vocab_size: int

    def reference(self, inputs: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Outputs [T, size] of ids [T] or features [T, F], and the last state [KEY, VALUE]."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        state = np.full((KEY, VALUE), 0.25)
        rows = []
        for step in inputs:
            e = w["E"][step] if np.ndim(step) == 0 else np.asarray(step, np.float64) @ w["E"]
            state = DECAY * state + np.outer(e @ w["Wk"], e @ w["Wv"])
            rows.append((e @ w["Wq"] @ state @ w["Wo"] + e) @ w["Wh"])
        return np.stack(rows), state


def train_tokenizer(path: Path) -> int:
    """Write a byte-level BPE of 300 ids; returns the vocabulary size."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer.save(str(path))
    return int(tokenizer.get_vocab_size())


def build(folder: Path, seed: int = 0, *, model_hash: str = "11" * 32, **changes: Any) -> Tiny:
    """Write the bundle; ``changes`` replace fields of the manifest."""
    (folder / "onnx").mkdir(parents=True)
    vocab = train_tokenizer(folder / "tokenizer.json")
    weights = _weights(vocab, vocab, np.random.default_rng(seed))
    (folder / "config.json").write_text(json.dumps({"hidden_size": WIDTH, "layers": ["x"]}))
    tokenizer = TokenizerRecord("tokenizer.json", 0, {"<|end|>": 0})
    fields: dict[str, Any] = {
        "model_hash": model_hash, "input": Tokens(vocab), "output": Output(vocab),
        "states": STATES, "tokenizer": tokenizer,
        "profile": "plain", "opset": 21, "min_onnxruntime": "1.20.0", "default_variant": "model",
        "max_time": CHUNK, "chunk": CHUNK, **changes,
    }  # fmt: skip
    contract = Manifest(**fields, variants={}).io_part()
    variants = _write_variants(folder, weights, contract)
    files = file_records(folder, ["tokenizer.json", "config.json"])
    Manifest(**fields, variants=variants, files=files).write(folder)
    return Tiny(folder, weights, vocab)


def build_features(folder: Path, output: Output) -> Tiny:
    """Write the bundle with FEATURES numbers a step in the place of tokens."""
    (folder / "onnx").mkdir(parents=True)
    weights = _weights(FEATURES, output.size, np.random.default_rng(0))
    fields: dict[str, Any] = {
        "model_hash": "33" * 32, "input": Features(FEATURES), "output": output,
        "states": STATES, "tokenizer": None, "profile": "plain", "opset": 21,
        "min_onnxruntime": "1.20.0", "default_variant": "model", "max_time": CHUNK, "chunk": CHUNK,
    }  # fmt: skip
    contract = Manifest(**fields, variants={}).io_part()
    variants = _write_variants(folder, weights, contract)
    Manifest(**fields, variants=variants).write(folder)
    return Tiny(folder, weights, 0)


def add_chat(folder: Path, template: str, **generation: Any) -> None:
    """Give a written bundle a chat template and the settings of its authors."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    manifest = Manifest.read(folder)
    assert manifest.tokenizer is not None
    record = dataclasses.replace(
        manifest.tokenizer,
        chat_template="chat_template.jinja",
        chat_tokens={"bos_token": "<|end|>", "eos_token": "<|end|>"},
        eos_token_ids=(0, 290),
    )
    names = [*manifest.files, "chat_template.jinja", "generation_config.json"]
    files = file_records(folder, names)
    dataclasses.replace(manifest, tokenizer=record, files=files).write(folder)


def _weights(rows: int, outputs: int, random: np.random.Generator) -> dict[str, Any]:
    """Random matrices."""
    shapes = {
        "E": (rows, WIDTH), "Wq": (WIDTH, KEY), "Wk": (WIDTH, KEY), "Wv": (WIDTH, VALUE),
        "Wo": (VALUE, WIDTH), "Wh": (WIDTH, outputs),
    }  # fmt: skip
    return {
        name: (random.standard_normal(shape) * 0.4).astype(np.float32)
        for name, shape in shapes.items()
    }


def _write_variants(
    folder: Path, weights: dict[str, Any], contract: dict[str, Any]
) -> dict[str, Variant]:
    """Write the graph twice."""
    variants = {}
    for name in ("model", "model_q8"):
        files = _write_graph(folder, f"onnx/{name}.onnx", weights, contract)
        quantisation = {"bits": 8, "block_size": 32} if name == "model_q8" else None
        variants[name] = Variant(f"onnx/{name}.onnx", file_records(folder, files), quantisation)
    return variants


def _write_graph(
    folder: Path, file: str, weights: dict[str, Any], contract: dict[str, Any]
) -> list[str]:
    """Write the graph with external data; returns the files."""
    source, target = contract["input"]["name"], contract["output"]["name"]
    model = helper.make_model(
        helper.make_graph(
            _nodes(source, target),
            "tiny",
            *_signature(weights, source, target),
            _initializers(weights),
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    helper.set_model_props(model, {METADATA_KEY: json.dumps(contract)})
    onnx.checker.check_model(model)
    onnx.save(
        model, folder / file, save_as_external_data=True, location=Path(file).name + "_data",
        size_threshold=64,
    )  # fmt: skip
    return [file, f"{file}_data"]


def _signature(weights: dict[str, Any], source: str, target: str) -> tuple[list[Any], list[Any]]:
    """Graph inputs and outputs."""
    state, size = ["batch", KEY, VALUE], weights["Wh"].shape[1]
    steps: tuple[Any, list[Any]] = (TensorProto.INT64, ["batch", "time"])
    if source == "features":
        steps = (TensorProto.FLOAT, ["batch", "time", len(weights["E"])])
    inputs = [
        helper.make_tensor_value_info(source, *steps),
        helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, []),
        helper.make_tensor_value_info("past_recurrent.0", TensorProto.FLOAT, state),
        helper.make_tensor_value_info("past_position", TensorProto.INT64, ["batch"]),
    ]
    outputs = [
        helper.make_tensor_value_info(target, TensorProto.FLOAT, ["batch", "kept", size]),
        helper.make_tensor_value_info("present_recurrent.0", TensorProto.FLOAT, state),
        helper.make_tensor_value_info("present_position", TensorProto.INT64, ["batch"]),
    ]
    return inputs, outputs


def _initializers(weights: dict[str, Any]) -> list[Any]:
    """Weights, and tables of a^(t+1), a^(t-s) and a^(T-1-s) for up to CHUNK tokens."""
    t = np.arange(CHUNK)
    lag = t[:, None] - t[None, :]
    tables = {
        **weights,
        "rise": DECAY ** (t + 1.0)[:, None],
        "within": np.where(lag >= 0, DECAY ** np.maximum(lag, 0), 0),
    }
    tensors = [numpy_helper.from_array(v.astype(np.float32), k) for k, v in tables.items()]
    integers = {
        "num_logits_to_keep": np.int64(1), "zero": np.int64(0), "one": np.int64(1),
        "last": np.array([-1]), "end": np.array([2**31]), "axis0": np.array([0]),
        "axis1": np.array([1]), "axis_first": np.array([0]),
    }  # fmt: skip
    return tensors + [
        numpy_helper.from_array(np.asarray(v, np.int64), k) for k, v in integers.items()
    ]


def _nodes(source: str, target: str) -> list[Any]:
    """The one-chunk form: carried part + causal part, and the state after the chunk."""
    node = helper.make_node
    is_text = source == "input_ids"
    carried = [
        node("Gather", ["E", source], ["e"]) if is_text else node("MatMul", [source, "E"], ["e"]),
        node("MatMul", ["e", "Wq"], ["q"]),
        node("MatMul", ["e", "Wk"], ["k"]),
        node("MatMul", ["e", "Wv"], ["v"]),
        node("Shape", [source], ["time_v"], start=1, end=2),
        node("Squeeze", ["time_v"], ["time"]),
        node("Range", ["zero", "time", "one"], ["steps"]),
        node("Gather", ["rise", "steps"], ["rise_t"]),  # fails when T > CHUNK
        node("Gather", ["within", "steps"], ["within_rows"]),
        node("Gather", ["within_rows", "steps"], ["within_t"], axis=1),
        node("MatMul", ["q", "past_recurrent.0"], ["qs"]),
        node("Mul", ["qs", "rise_t"], ["from_state"]),
    ]
    chunk = [
        node("Transpose", ["k"], ["k_t"], perm=[0, 2, 1]),
        node("MatMul", ["q", "k_t"], ["scores"]),
        node("Mul", ["scores", "within_t"], ["masked"]),
        node("MatMul", ["masked", "v"], ["from_chunk"]),
        node("Add", ["from_state", "from_chunk"], ["o"]),
        node("Slice", ["within_t", "last", "end", "axis0"], ["fall"]),
        node("Mul", ["k_t", "fall"], ["k_fall"]),
        node("MatMul", ["k_fall", "v"], ["grown"]),
        node("Slice", ["rise_t", "last", "end", "axis0"], ["whole"]),
        node("Mul", ["past_recurrent.0", "whole"], ["kept_state"]),
        node("Add", ["kept_state", "grown"], ["present_recurrent.0"]),
        node("Add", ["past_position", "time_v"], ["present_position"]),
    ]
    head = [
        node("MatMul", ["o", "Wo"], ["mixed"]),
        node("Add", ["mixed", "e"], ["hidden"]),
        node("Neg", ["num_logits_to_keep"], ["first"]),
        node("Unsqueeze", ["first", "axis_first"], ["start"]),
        node("Slice", ["hidden", "start", "end", "axis1"], ["kept"]),
        node("MatMul", ["kept", "Wh"], [target]),
    ]
    return carried + chunk + head
