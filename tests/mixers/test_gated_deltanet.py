"""Options of the mixer ``gated_deltanet``."""

from __future__ import annotations

from typing import Any

import pytest

from edgelin import mixers
from edgelin.errors import EdgelinError

SIZES = {"type": "gated_deltanet", "num_heads": 4, "key_dim": 6, "value_dim": 10}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_key_heads": 3}, "num_heads is 4, no multiple of num_key_heads = 3; give a multiple"),
        ({"num_key_heads": 0}, "num_key_heads is 0; give at least 1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be above 0 and below 1"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**SIZES, **change}, 20, 0, 1e-6, where="model.mixers.m")


def test_grouped_keys_have_fewer_parameters_and_a_narrower_convolution() -> None:
    mixer: Any = mixers.build({**SIZES, "num_key_heads": 2}, 20, 0, 1e-6, where="model.mixers.m")
    assert mixer.conv_weight.shape == (2 * 2 * 6 + 4 * 10, 4)
    assert [spec.shape for spec in mixer.state_specs()] == [(64, 3), (4, 6, 10)]
