"""DeltaNet: the delta rule without decay.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T ;  o_t = S_t^T q_t / sqrt(K)

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
(2024), arXiv:2406.06484, eq. 2. Everything else is shared with Gated DeltaNet, the output gate
too, which the paper's models have not (``output_gate = false``).
"""

from __future__ import annotations

from edgelin.mixers import gated_deltanet
from edgelin.mixers.gated_deltanet import Config


class Mixer(gated_deltanet.Mixer):
    """:class:`edgelin.mixers.gated_deltanet.Mixer` with g = 0."""

    decays = False


__all__ = ["Config", "Mixer"]
