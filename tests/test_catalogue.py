"""What is said of families and layers beside the modules themselves."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from edgelin import catalogue, families
from edgelin.config import load_run
from edgelin.model import SequenceModel

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


def test_every_family_is_found() -> None:
    found = {family.name: family for family in catalogue.families()}
    modules = families.modules()
    assert set(found) == set(modules)
    for name, module in modules.items():
        family = found[name]
        assert set(family.model_types) == set(module.MODEL_TYPES), name
        assert family.mixers and "\n\n".join(family.about) == module.__doc__.strip(), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_states_and_fused_forms(path: Path) -> None:
    config = load_run(path).model
    model = SequenceModel(config)
    for block in model.blocks:
        for branch in [p for b in block.branches() for p in getattr(b, "parts", [b])]:
            if not type(branch).__module__.startswith("edgelin.mixers."):
                continue
            said = catalogue.mixer(type(branch).__module__.rpartition(".")[2])
            for spec in branch.state_specs():
                layout = dict(said.states)[spec.kind]
                assert layout_fits(layout, spec.layout), (spec, layout)
            for name in (*said.fused, *said.plain):
                module = importlib.import_module(f"edgelin.recurrences.{name}.onnx")
                assert (module.fused is not module.plain) == (name in said.fused)


def layout_fits(said: str, real: str) -> bool:
    """Whether a layout is the real one, where a word such as "a/b" is one of both."""
    words, wanted = said.split(" "), real.split(" ")
    return len(words) == len(wanted) and all(
        word in choice.split("/") for choice, word in zip(words, wanted, strict=True)
    )


def test_the_page_of_families_is_up_to_date() -> None:
    page = importlib.import_module("edgelin.families.__main__").document()
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == page, (
        "run: python -m edgelin.families > docs/families.md"
    )
