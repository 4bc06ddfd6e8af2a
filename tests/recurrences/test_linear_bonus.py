"""The linear recurrence that reads before the write: every form against a float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linear_cases import DECAYS, HARD, error, make, onnx_run, onnx_session, true_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from edgelin.recurrences.linear import chunked, delayed, linear, reference
from edgelin.recurrences.linear import onnx as linear_onnx


def loop(q, k, v, g, state, scale, bonus=None):
    """The equation in numpy float64: read, then decay, then write."""
    q, k, v, s = (x.detach().double().cpu().numpy() for x in (q, k, v, state))
    u = 0.0 if bonus is None else bonus.detach().double().numpy()
    outputs = []
    for t in range(q.shape[1]):
        own = np.einsum("bhk,bhv->bhkv", u * k[:, t], v[:, t])
        outputs.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], s + own))
        if g is not None:
            decay = np.exp(np.maximum(g[:, t].detach().double().cpu().numpy(), -90.0))
            s = s * decay.reshape(*decay.shape[:2], -1, 1)
        s = s + np.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
    return torch.from_numpy(np.stack(outputs, 1)), torch.from_numpy(s)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("time", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("form", [reference.forward, chunked.forward])
def test_torch_forms(form, time, decay):
    inputs = make(decay, time, batch=3)
    for got, want in zip(form(*inputs, 0.3, True), loop(*inputs, 0.3), strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("hard", HARD)
def test_chunked_hard_decays(hard, decay):
    inputs = make(decay, 130, hard=hard)
    for got, want in zip(chunked.forward(*inputs, 0.3, True), loop(*inputs, 0.3), strict=True):
        assert error(got, want) < 2e-6


def test_identical_keys():
    """A thousandfold sum of one key is no harder than others."""
    q, k, v, g, state = make("key", 130, hard="zeros")
    q, k = q[:, :1].expand_as(q).contiguous(), k[:, :1].expand_as(k).contiguous()
    inputs = (q, k, v, g, state)
    for got, want in zip(chunked.forward(*inputs, 1.0, True), loop(*inputs, 1.0), strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("decay", DECAYS)
def test_bonus(decay):
    """Calls of any length that hand the state on, with the own value by the bonus."""
    q, k, v, g, start = make(decay, 130, batch=3)
    u = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    want = loop(q, k, v, g, start, 0.3, u)
    for cuts in ([130], [1, 64, 1, 64]):
        state, parts, begin = start, [], 0
        for length in cuts:
            part = (None if x is None else x[:, begin : begin + length] for x in (q, k, v, g))
            o, state = linear(*part, state, scale=0.3, bonus=u)
            parts.append(o)
            begin += length
        assert error(torch.cat(parts, 1), want[0]) < 2e-6
        assert error(state, want[1]) < 2e-6


def test_own_decay_is_not_read():
    """The decay and the write of a token change what later tokens read, not what it reads."""
    q, k, v, g, state = make("key", 65)
    before, _ = linear(q, k, v, g, state, bonus=torch.zeros(2, 6))
    changed = [x.clone() for x in (k, v, g)]
    for x in changed:
        x[:, 40] *= 3.0
    after, _ = linear(q, *changed, state, bonus=torch.zeros(2, 6))
    assert torch.equal(before[:, :41], after[:, :41])
    assert not torch.equal(before[:, 41:], after[:, 41:])


@pytest.mark.parametrize("decay", DECAYS)
def test_gradients(decay):
    """The op's gradients, by differences (gradcheck) and by autograd through the loop."""

    def op(q, k, v, *rest):
        g = rest[0] if len(rest) == 2 else None
        return torch.ops.edgelin.linear(q, k, v, g, rest[-1], 0.7, True)

    small = make(decay, 5, key=3, value=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in small if x is not None])
    inputs = make(decay, 66, dtype=torch.float64)
    grads = [torch.randn_like(inputs[2]), torch.randn_like(inputs[4])]
    want, _ = true_gradients(inputs, 0.7, grads, True)
    leaves = [x.clone().requires_grad_() for x in inputs if x is not None]
    for got, right in zip(torch.autograd.grad(op(*leaves), leaves, grads), want, strict=True):
        assert error(got, right) < 1e-12


def test_bonus_gradients():
    q, k, v, g, state = make("key", 5, key=3, value=2, dtype=torch.float64)
    u = torch.randn(2, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, g, state, u)]
    assert torch.autograd.gradcheck(lambda *x: linear(*x[:5], scale=0.7, bonus=x[5]), leaves)


@pytest.mark.parametrize("decay", DECAYS)
def test_op_registration(decay):
    """Schema, fakes and autograd registrations agree, so torch.compile and export can trace."""
    q, k, v, g, state = make(decay, 7)
    for x in (q, k, v, state):
        x.requires_grad_()
    torch.library.opcheck(
        torch.ops.edgelin.linear.default,
        (q, k, v, g, state, 0.5, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    arguments = (q, k, v, g, state, 0.5, True, torch.ones_like(v), state, [])
    real = torch.ops.edgelin.linear_backward(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        fake = torch.ops.edgelin.linear_backward(*fakes)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_types():
    """Under bfloat16 the own value is added before rounding; the state stays float32."""
    q, k, v, g, state = make("key", 9, dtype=torch.bfloat16)
    u = torch.randn(2, 6)
    o, final = linear(q, k, v, g, state, bonus=u)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert error(o, loop(q, k, v, g, state, 1.0, u)[0]) < 1e-2


def test_bonus_and_normalizer():
    with pytest.raises(ValueError, match="bonus and normalizer are both given"):
        linear(*make("key", 4), bonus=torch.ones(2, 6), normalizer=torch.ones(1, 2, 6))


@pytest.mark.parametrize("decay", DECAYS)
def test_delayed_forms(decay):
    """One token more of the usual order gives the other order, and its gradients."""
    inputs = make(decay, 66, batch=3, dtype=torch.float64)
    grads = [torch.randn_like(inputs[2]), torch.randn_like(inputs[4])]
    *moved, state = inputs
    got = delayed.forward(reference.forward, moved, state, 0.3)

    def backward(*arguments):
        return torch.ops.edgelin.linear_backward(*arguments[:6], False, *arguments[6:], [])

    found = delayed.backward(backward, moved, state, 0.3, *grads)
    want, results = true_gradients(inputs, 0.3, grads, True)
    assert all(x.is_contiguous() for x in (*got, *found))
    found = [x for x in found if x.numel()]
    for a, b in zip((*got, *found), (*results, *want), strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time", [1, 33])
def test_kernel(time, dtype, decay, device):
    """What the op runs on a GPU."""
    from edgelin.recurrences.linear import kernel, kernel_backward

    # In bfloat16 the kernels get multiples of 64 only (edgelin.recurrences.widths).
    key, value = (64, 64) if dtype == torch.bfloat16 else (20, 12)
    inputs = make(decay, time, heads=1, key=key, value=value, dtype=dtype)
    rng = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=rng).to(x.dtype) for x in (inputs[2], inputs[4])]
    *moved, state = (None if x is None else x.to(device) for x in inputs)
    do, dstate = (x.to(device) for x in grads)
    got = delayed.forward(kernel.forward, moved, state, 0.3)
    found = delayed.backward(kernel_backward.backward, moved, state, 0.3, do, dstate)
    want, results = true_gradients(inputs, 0.3, grads, True)
    found = [x for x in found if x.numel()]
    limit = 5e-6 if dtype == torch.float32 else 3e-2
    for a, b in zip((*got, *found), (*results, *want), strict=True):
        assert error(a, b) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key, value", [(64, 64), (48, 20)])
@pytest.mark.parametrize("time", [1, 300])
def test_op_on_gpu(time, key, value, dtype, decay, device):
    """The public function with its bonus under autograd on a GPU, against float64 on the CPU."""
    inputs = make(decay, time, batch=2, key=key, value=value, dtype=dtype)
    u = torch.randn(2, key, generator=torch.Generator().manual_seed(3))
    outcomes = []
    for place in (device, "cpu"):
        leaves = [None if x is None else x.to(place) for x in (*inputs, u)]
        leaves = [x if x is None or place == device else x.double() for x in leaves]
        leaves = [None if x is None else x.detach().requires_grad_() for x in leaves]
        o, final = linear(*leaves[:5], scale=0.1, bonus=leaves[5])
        (o.sum() + final.square().sum()).backward()
        outcomes.append([o, final, *(x.grad for x in leaves if x is not None)])
    for got, want in zip(*outcomes, strict=True):
        if want.abs().max() > 0:
            assert error(got, want) < (2e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", [linear_onnx.plain, linear_onnx.fused])
def test_onnx(form, decay):
    session = onnx_session(form, decay, 2, 6, 5, 0.3, exclusive=True)
    for time in (1, 7, 63, 64):
        for hard in (None, *HARD) if decay != "none" else (None,):
            inputs = make(decay, time, batch=3, hard=hard, seed=time)
            for got, want in zip(onnx_run(session, inputs), loop(*inputs, 0.3), strict=True):
                assert error(got, want) < 2e-6, (time, hard)


@pytest.mark.parametrize("decay", DECAYS)
def test_onnx_long_call(decay):
    """The one-chunk form refuses more than a chunk; the fused operator takes any length."""
    inputs = make(decay, 65)
    with pytest.raises(Exception, match=r"Gather|indices"):
        onnx_run(onnx_session(linear_onnx.plain, decay, 2, 6, 5, 1.0, exclusive=True), inputs)
    session = onnx_session(linear_onnx.fused, decay, 2, 6, 5, 1.0, exclusive=True)
    assert error(onnx_run(session, inputs)[0], loop(*inputs, 1.0)[0]) < 2e-6
