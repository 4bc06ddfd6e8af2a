"""The golden dialogues that other runners replay: what this code makes, and transformers shows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from edgelin.runtimes.session import Bundle

GOLDEN = Path(__file__).parents[2] / "runtimes" / "golden"


def load_maker() -> Any:
    """The script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("golden_dialogues", GOLDEN / "dialogues.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = json.loads((GOLDEN / "dialogues.json").read_text(encoding="utf-8"))


def test_every_template_is_there() -> None:
    maker = load_maker()
    names = [path.name for path in maker.templates()]
    assert [case["template"] for case in CASES[:: len(maker.conversations())]] == names


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['template']}-{len(c['messages'])}")
def test_golden_dialogue(case: dict[str, Any]) -> None:
    maker, folder = load_maker(), GOLDEN / "fused" / "bundle"
    template = maker.TEMPLATES / case["template"]
    assert maker.case(Bundle(folder, threads=1), template, case["messages"]) == case
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), **case["tokens"]
    )
    theirs = tokenizer.apply_chat_template(
        case["messages"],
        chat_template=template.read_text(encoding="utf-8"),
        add_generation_prompt=True,
        tokenize=False,
    )
    assert theirs == case["text"]
