"""Linear attention over a whole sequence, against sums over pairs of tokens in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_cases import error

from edgelin.recurrences.linear.bidirectional import bidirectional


def loop(q, k, v, mask, scale, normalize, eps):
    """Every token's weights for all others, one pair at a time."""
    q, k, v = (x.detach().double().cpu().numpy() for x in (q, k, v))
    o = np.zeros(v.shape)
    for b, i, h in np.ndindex(*q.shape[:3]):
        there = [j for j in range(k.shape[1]) if mask is None or mask[b, j]]
        weights = [scale * float(q[b, i, h] @ k[b, j, h]) for j in there]
        total = sum((w * v[b, j, h] for w, j in zip(weights, there, strict=True)), np.zeros(()))
        o[b, i, h] = total / (sum(weights) + eps) if normalize else total
    return torch.from_numpy(o)


def make(batch, time, *, dtype=torch.float32, key=6, value=5):
    """Positive q and k, v, and a mask with rows of 1 to T tokens."""
    rng = torch.Generator().manual_seed(time)
    q, k = (torch.rand(batch, time, 2, key, generator=rng, dtype=torch.float64) for _ in range(2))
    v = torch.randn(batch, time, 2, value, generator=rng, dtype=torch.float64)
    lengths = torch.linspace(1, time, batch).long()
    mask = torch.arange(time) < lengths[:, None]
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 1), (3, 33), (1, 65)])
def test_values(batch, time, normalize, masked, device):
    q, k, v, mask = make(batch, time)
    mask = mask if masked else None
    moved = [None if x is None else x.to(device) for x in (q, k, v, mask)]
    got = bidirectional(*moved[:3], mask=moved[3], scale=0.3, normalize=normalize, eps=1e-3)
    assert error(got, loop(q, k, v, mask, 0.3, normalize, 1e-3)) < 2e-6


def test_gradients():
    q, k, v, mask = make(2, 5, dtype=torch.float64, key=3, value=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: bidirectional(*x, mask=mask, scale=0.3), leaves)


def test_absent_tokens_change_nothing():
    """Whatever stands in the padding, infinities included; a row without tokens is zero."""
    q, k, v, mask = make(3, 9)
    mask[0] = False
    o = bidirectional(q, k, v, mask=mask)
    assert (o[0] == 0).all() and o.isfinite().all()
    k[~mask], v[~mask] = torch.inf, torch.nan
    assert torch.equal(bidirectional(q, k, v, mask=mask), o)


def test_sums_keep_their_digits_in_bfloat16(device):
    """Inputs in bfloat16 and autocast on: sums over 2000 equal tokens are still float32."""
    shape = (1, 2000, 1, 4)
    q = k = torch.ones(shape, dtype=torch.bfloat16, device=device)
    v = torch.full(shape, 0.75, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, torch.bfloat16):
        sums = bidirectional(q, k, v, normalize=False)
        o = bidirectional(q, k, v)
    assert o.dtype == torch.bfloat16
    assert (sums == torch.tensor(6000.0).bfloat16().to(device)).all() and (o == 0.75).all()


def test_export():
    """Batch and time stay free, with a mask and without."""

    class Attention(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return bidirectional(q, k, v, mask=mask), bidirectional(q, k, v)

    batch, time = torch.export.Dim("batch", max=64), torch.export.Dim("time", max=512)
    axes = {0: batch, 1: time}
    program = torch.export.export(Attention(), make(2, 7), dynamic_shapes=(axes,) * 4).module()
    for sizes in ((1, 1), (3, 40)):
        q, k, v, mask = make(*sizes)
        for got, seen in zip(program(q, k, v, mask), (mask, None), strict=True):
            assert error(got, loop(q, k, v, seen, 1.0, True, 1e-6)) < 2e-6


@pytest.mark.parametrize("which, match", [(1, "need"), (2, "need"), (3, "mask is")])
def test_wrong_shapes(which, match):
    inputs = list(make(2, 4))
    inputs[which] = inputs[which].float()[:, :, 0] if which < 3 else inputs[which].float()
    with pytest.raises(ValueError, match=match):
        bidirectional(*inputs[:3], mask=inputs[3])
