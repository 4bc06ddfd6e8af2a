"""The golden stream's reference, which never holds a model in float64, beside one that does."""

from __future__ import annotations

import copy
from typing import Any

import export_models
import numpy as np
import pytest
import torch

from edgelin.config import FeatureConfig, ModelConfig
from edgelin.export import golden
from edgelin.export.quantise.rounding import Rounded, round_matrix
from edgelin.export.reference import reference
from edgelin.model import SequenceModel


def text(**changes: Any) -> SequenceModel:
    """One layer of each of four mixers, with a capped head."""
    names = ("gdn", "linear", "full", "ssm")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "layers": names, "vocab_size": 9000,
        "mixers": {name: export_models.MIXERS[name] for name in names}, "logit_softcap": 2.0,
    }  # fmt: skip
    return SequenceModel(ModelConfig(**{**sizes, **changes})).eval()


def features() -> SequenceModel:
    """A model of features that reads the mean of its stream."""
    stream = FeatureConfig(5, 3, "sequence")
    return text(vocab_size=0, features=stream, logit_softcap=0.0)


def plainly(model: SequenceModel, rounded: dict[str, Rounded]) -> Any:
    """Outputs and states of a float64 copy."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for name, matrix in rounded.items():
            parameter = exact.get_parameter(name)
            parameter.copy_(torch.from_numpy(matrix.values(parameter.shape[1])))
        inputs = torch.from_numpy(golden.inputs_of(model))[None]
        return exact(inputs.double() if inputs.is_floating_point() else inputs)


@pytest.mark.parametrize("kind", ["tied", "untied", "features"])
@pytest.mark.parametrize("bits", [None, 4])
def test_reference(kind: str, bits: int | None) -> None:
    model = features() if kind == "features" else text(tie_word_embeddings=kind == "tied")
    rounded = {}
    for name, parameter in model.named_parameters():
        if bits and parameter.ndim == 2 and min(parameter.shape) >= 16:
            rounded[name] = round_matrix(parameter.detach().numpy(), bits, 32)
    assert not bits or len(rounded) > 7
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    outputs, states = plainly(model, rounded)
    found = reference(model, rounded)
    assert found.outputs.dtype == np.float64
    np.testing.assert_allclose(found.outputs, outputs[0].numpy(), rtol=0, atol=1e-12)
    for name, value in found.states.items():
        np.testing.assert_allclose(value, states[name][0].numpy(), rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        place, content = before[name]
        assert parameter.dtype == torch.float32 and parameter.data_ptr() == place
        assert torch.equal(parameter, content)


def test_reference_in_float32() -> None:
    model = text()
    with torch.no_grad():
        wanted, states = model(torch.from_numpy(golden.inputs_of(model))[None])
    found, exact = reference(model, dtype=torch.float32), reference(model)
    np.testing.assert_allclose(found.outputs, wanted[0].double(), rtol=0, atol=1e-5)
    assert all(np.allclose(found.states[n], x[0], rtol=0, atol=1e-5) for n, x in states.items())
    noise = np.abs(found.outputs - exact.outputs).max()
    assert 1e-9 < noise < 1e-5


def test_compare() -> None:
    draw = np.random.default_rng(0)
    one, two = draw.standard_normal((2, 130, 40)), {"s": np.ones(3)}
    other = one + 1e-3 * draw.standard_normal(one.shape)
    wanted = golden.Stream(np.zeros(130), one[0], two, True)
    errors = golden.compare(
        wanted, golden.Stream(np.zeros(130), other[0], {"s": np.zeros(3)}, True)
    )
    difference = other[0] - one[0]
    assert errors.max_difference == np.abs(difference).max()
    assert errors.outputs == np.abs(difference).max() / np.abs(one[0]).max()
    rms = np.sqrt(np.square(difference).mean() / np.square(one[0]).mean())
    assert errors.outputs_rms == pytest.approx(rms)
    same = (one[0].argmax(-1) == other[0].argmax(-1)).mean()
    assert errors.top1 == same and errors.states == 1 and errors.finite
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (one[0], other[0]))
    assert errors.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean())
    other[0, 77, 3] = np.nan
    assert not golden.compare(wanted, golden.Stream(np.zeros(130), other[0], two, True)).finite
    plain = golden.compare(
        golden.Stream(np.zeros(1), one[0], two, False),
        golden.Stream(np.zeros(1), one[0], two, False),
    )
    assert plain.top1 is None and plain.kl is None and plain.outputs == 0
