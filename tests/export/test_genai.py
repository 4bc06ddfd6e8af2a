"""Bundles as others read them: a folder of Hugging Face's shape, run by onnxruntime-genai."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import export_models
import onnx
import pytest
import transformers

import edgelin
from edgelin import checkpoint, tokenizer
from edgelin.export.bundle import export_checkpoint

TOKENS = 24
PROMPT = "a small text of a few words and more words"
# In a process of its own, with the copy of onnxruntime that it brings in.
GENAI = f"""
import json, sys
import numpy as np
import onnxruntime_genai as genai
model = genai.Model(sys.argv[1])
options = genai.GeneratorParams(model)
options.set_search_options(max_length=200)
generator = genai.Generator(model, options)
prompt = genai.Tokenizer(model).encode({PROMPT!r})
generator.append_tokens(np.array([prompt], np.int32))
found = []
while len(found) < {TOKENS} and not generator.is_done():
    generator.generate_next_token()
    found.append(int(generator.get_next_tokens()[0]))
print(json.dumps([[int(token) for token in prompt], found]))
"""


def _export(folder: Path, layers: tuple[str, ...], quantise: tuple[str, ...]) -> Path:
    """A bundle of random weights."""
    tokens = tokenizer.train([f"{PROMPT} " * 20], export_models.VOCAB)
    model = export_models.make_model(layers, tied=False)
    checkpoint.save(folder / "model", model, tokens.to_str())
    export_checkpoint(folder / "model", folder / "bundle", quantise=quantise)
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _export(tmp_path_factory.mktemp("linear"), ("gdn", "gdn"), ("none", "int4"))


def test_genai_writes_our_greedy_tokens(bundle: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    done = subprocess.run(
        [sys.executable, "-c", GENAI, str(bundle)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    opened = edgelin.load(bundle)
    prompt = opened.text.encode(PROMPT)
    stream, ids = opened.stream(), []
    logits = stream.feed(prompt)
    while len(ids) < TOKENS and (not ids or ids[-1] != 0):
        ids.append(int(logits.argmax()))
        logits = stream.feed(ids[-1:])
    assert json.loads(done.stdout) == [prompt, ids]
    assert len(set(ids)) > 3


def test_a_bundle_that_genai_cannot_run_says_nothing_of_it(tmp_path: Path) -> None:
    """Its normalisers have no place there."""
    assert not (_export(tmp_path, ("gdn", "linear"), ("none",)) / "genai_config.json").exists()


def test_folder_has_the_layout_of_transformers_js(bundle: Path) -> None:
    """Names of files and states that its loader puts together; weights beside each graph."""
    content = json.loads((bundle / "edgelin.json").read_text())
    assert {*content["variants"]} == {"model", "model_q4"}
    for name in content["variants"]:
        graph = onnx.load(bundle / "onnx" / f"{name}.onnx", load_external_data=False)
        assert (bundle / "onnx" / f"{name}.onnx_data").is_file()
        inputs = {value.name for value in graph.graph.input}
        outputs = {value.name for value in graph.graph.output}
        for layer in (0, 1):
            assert {f"past_conv.{layer}", f"past_recurrent.{layer}"} <= inputs
            assert {f"present_conv.{layer}", f"present_recurrent.{layer}"} <= outputs
        assert "input_ids" in inputs and "logits" in outputs
    assert "genai_config.json" in content["files"]


def test_transformers_reads_what_is_not_the_graph(bundle: Path) -> None:
    codec = transformers.AutoTokenizer.from_pretrained(bundle)
    assert codec(PROMPT)["input_ids"] == edgelin.load(bundle).text.encode(PROMPT)
    assert transformers.GenerationConfig.from_pretrained(bundle).eos_token_id in (0, [0])
