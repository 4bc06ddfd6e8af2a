"""Checkpoints of other projects from the command line: import, train on, export, talk, measure."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tokenizers as library
import torch
from click.testing import CliRunner, Result
from torch.nn import functional as F
from transformers import Mamba2Config, Mamba2ForCausalLM

from edgelin import checkpoint
from edgelin.cli import main
from edgelin.config import load_run
from edgelin.runtimes.manifest import Manifest
from edgelin.train.data import prepare
from edgelin.train.order import Order

VOCABULARY = 320
TEXT = "once upon a time there was a river, and then another<|endoftext|>\n"
CHAT = "{% for m in messages %}<|im_end|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_end|>"
RUN = """
log_every = 1
save_every = 0
eval_every = 0
[data]
train = ["text.txt"]
valid = ["text.txt"]
[optim]
steps = 2
batch_size = 4
sequence_length = 32
learning_rate = 1e-3
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Mamba-2 folder as a hub has it, with two end tokens and a chat template; and its model."""
    folder = tmp_path_factory.mktemp("hub") / "mamba2"
    config = Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16,
        state_size=8, n_groups=2, chunk_size=16, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = oracle.randomise(Mamba2ForCausalLM(config))
    model.save_pretrained(folder)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return folder, model


@pytest.fixture(scope="module")
def imported(foreign: tuple[Path, Any]) -> Path:
    out = foreign[0].with_name("own")
    result = _edgelin("import", foreign[0], "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: 2 layers (mamba2)\n"
    return out


def _edgelin(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], input=stdin)


def _failed(result: Result) -> str:
    assert result.exit_code == 1, (result.output, result.exception)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    return last


def test_import_is_whole_or_not_at_all(
    foreign: tuple[Path, Any], imported: Path, tmp_path: Path
) -> None:
    assert "exists; choose another --out" in _failed(_edgelin("import", foreign[0], "-o", imported))
    assert "is a checkpoint of edgelin already" in _failed(_edgelin("import", imported))
    broken = Path(shutil.copytree(foreign[0], tmp_path / "broken"))
    values = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 1}))
    assert "does not account for" in _failed(_edgelin("import", broken))
    (broken / "config.json").write_text(json.dumps(values | {"surprise": 1}))
    assert "'surprise'" in _failed(_edgelin("import", broken))
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
    result = _edgelin("import", foreign[0], "-o", tmp_path / "deep" / "out")
    assert result.exit_code == 0 and checkpoint.load(tmp_path / "deep" / "out")


def test_the_first_loss_is_that_of_the_imported_model(
    foreign: tuple[Path, Any], imported: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 100)
    (tmp_path / "run.toml").write_text(RUN)
    out = tmp_path / "out"
    result = _edgelin(
        "train", tmp_path / "run.toml", "--init", imported, "--out", out, "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]

    run = load_run(tmp_path / "run.toml", model=checkpoint.read_config(imported))
    corpus = prepare(run, out)
    tokens = torch.from_numpy(corpus.train.astype(np.int64))
    inputs, targets = Order(tokens, run.optim, run.seed, carry_state=False).batch(0)
    with torch.no_grad():
        logits = foreign[1](inputs.long(), use_cache=False).logits
    wanted = float(F.cross_entropy(logits.flatten(0, 1), targets.long().flatten()))
    assert losses[0] == pytest.approx(wanted, abs=1e-3)
    assert abs(losses[0] - math.log(VOCABULARY)) > 0.1  # what fresh weights would give
    assert losses[1] < losses[0]
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (imported / name).read_bytes()
    again = _edgelin(
        "train", tmp_path / "run.toml", "--init", imported, "--out", out, "--device", "cpu",
        "--resume", "--set", "optim.steps=3",
    )  # fmt: skip
    assert again.exit_code == 0, again.output
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 7]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.hidden_size=64", "model.hidden_size is not that of --init"),
        ("model.layers=['mamba']", "model.layers is not that of --init"),
        (
            "model.mixers.mamba={type='mamba2', num_heads=2, head_dim=16, state_size=8}",
            "model.layers is not that of --init",
        ),
        ("data.tokenizer='other.json'", "not the tokenizer of --init"),
    ],
)
def test_another_model_is_refused(imported: Path, tmp_path: Path, setting: str, words: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "run.toml").write_text(RUN)
    other = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    other.save(str(tmp_path / "other.json"))
    result = _edgelin(
        "train", tmp_path / "run.toml", "--init", imported, "--out", tmp_path / "out",
        "--set", setting,
    )  # fmt: skip
    assert words in _failed(result)
    assert not (tmp_path / "out").exists()


def test_a_foreign_checkpoint_to_begin_with_is_to_be_imported(
    foreign: tuple[Path, Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    result = _edgelin("train", tmp_path / "run.toml", "--init", foreign[0])
    assert "edgelin import" in _failed(result)


def test_a_bundle_talks_and_is_verified_with_the_foreign_folder(
    foreign: tuple[Path, Any], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    result = _edgelin("export", foreign[0], "-o", bundle)
    assert result.exit_code == 0, result.output
    record = Manifest.read(bundle).tokenizer
    assert record is not None
    assert (record.eos_token_id, record.ends) == (0, {0, 1, 7})
    assert record.chat_template == "chat_template.jinja"
    assert record.chat_tokens == {"eos_token": "<|im_end|>"}
    said = _edgelin("run", bundle, "--chat", "Hello", "--max-tokens", 5, "--seed", 1)
    assert said.exit_code == 0, said.output
    result = _edgelin("verify", bundle, "--checkpoint", foreign[0])
    assert result.exit_code == 0, result.output


def test_eval_of_a_foreign_folder(foreign: tuple[Path, Any], imported: Path) -> None:
    text = Path(__file__).parents[2] / "CONTRIBUTING.md"
    arguments = ["--text", text, "--max-tokens", 200, "--json"]
    direct = _edgelin("eval", foreign[0], *arguments)
    assert direct.exit_code == 0, direct.output
    assert json.loads(direct.stdout) == json.loads(_edgelin("eval", imported, *arguments).stdout)


def test_a_folder_without_a_tokenizer_is_named(foreign: tuple[Path, Any], tmp_path: Path) -> None:
    bare = Path(shutil.copytree(foreign[0], tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    assert f"{bare} has no tokenizer; add" in _failed(_edgelin("export", bare))
    assert _edgelin("import", bare).exit_code == 0


def test_families_are_listed() -> None:
    result = _edgelin("families")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert rows["mamba2"].endswith("recurrent [batch heads key value]")
    assert "falcon_mamba" in result.stdout
