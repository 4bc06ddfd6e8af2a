"""The linear recurrence: every form against a float64 loop over tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from linear_cases import DECAYS, HARD, error, make, onnx_run, onnx_session, true_gradients
from torch._subclasses.fake_tensor import FakeTensorMode

from edgelin.recurrences.delta import onnx as delta_onnx
from edgelin.recurrences.graph import Graph
from edgelin.recurrences.linear import chunked, linear, reference
from edgelin.recurrences.linear import onnx as linear_onnx


def loop(q, k, v, g, state, scale):
    """The equation in numpy float64: an independent truth."""
    q, k, v, s = (x.detach().double().cpu().numpy() for x in (q, k, v, state))
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = np.exp(np.maximum(g[:, t].detach().double().cpu().numpy(), -90.0))
            s = s * decay.reshape(*decay.shape[:2], -1, 1)
        s = s + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.from_numpy(np.stack(outputs, 1)), torch.from_numpy(s)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("time", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("form", [reference.forward, chunked.forward])
def test_torch_forms(form, time, decay):
    inputs = make(decay, time, batch=3)
    for got, want in zip(form(*inputs, 0.3), loop(*inputs, 0.3), strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("hard", HARD)
def test_chunked_hard_decays(hard, decay):
    inputs = make(decay, 130, hard=hard)
    for got, want in zip(linear(*inputs, scale=0.3), loop(*inputs, 0.3), strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("decay", ["head", "key"])
def test_a_decay_of_minus_infinity_is_the_floor(decay):
    """Differences of its sums would be NaN."""
    q, k, v, g, state = make(decay, 70)
    g[:, 5::7] = -torch.inf
    for got, want in zip(linear(q, k, v, g, state), loop(q, k, v, g, state, 1.0), strict=True):
        assert error(got, want) < 2e-6


@pytest.mark.parametrize("decay", DECAYS)
def test_calls_continue(decay):
    """Uneven calls that hand the state on give what one call gives."""
    q, k, v, g, state = make(decay, 130)
    want = loop(q, k, v, g, state, 1.0)
    parts = []
    for start, end in ((0, 1), (1, 65), (65, 66), (66, 130)):
        part = [None if x is None else x[:, start:end] for x in (q, k, v, g)]
        o, state = linear(*part, state)
        parts.append(o)
    assert error(torch.cat(parts, 1), want[0]) < 2e-6
    assert error(state, want[1]) < 2e-6


def test_no_future():
    """A change of a later token leaves earlier outputs bit for bit as they were."""
    q, k, v, g, state = make("key", 65)
    before, _ = linear(q, k, v, g, state)
    changed = [x.clone() for x in (q, k, v, g)]
    for x in changed:
        x[:, 40:] *= 3.0
    after, _ = linear(*changed, state)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("decay", DECAYS)
def test_gradients(decay):
    """The op's gradients, by differences (gradcheck) and by autograd through the loop."""
    small = make(decay, 5, key=3, value=2, dtype=torch.float64)
    given = [x.requires_grad_() for x in small if x is not None]

    def op(q, k, v, *rest):
        g = rest[0] if len(rest) == 2 else None
        return torch.ops.edgelin.linear(q, k, v, g, rest[-1], 0.7, False)

    assert torch.autograd.gradcheck(op, given)
    inputs = make(decay, 66, dtype=torch.float64)
    grads = [torch.randn_like(inputs[2]), torch.randn_like(inputs[4])]
    want, _ = true_gradients(inputs, 0.7, grads)
    leaves = [x.clone().requires_grad_() for x in inputs if x is not None]
    for got, right in zip(torch.autograd.grad(op(*leaves), leaves, grads), want, strict=True):
        assert error(got, right) < 1e-12


def test_floor_stops_gradient():
    """Below the floor a decay has no effect on the result, so none on the gradient."""
    q, k, v, g, state = make("head", 4)
    g[:, 1] = -1000.0
    g.requires_grad_()
    linear(q, k, v, g, state)[0].sum().backward()
    assert torch.equal(g.grad[:, 1], torch.zeros_like(g.grad[:, 1]))
    assert (g.grad[:, 2] != 0).all()


def test_op_registration():
    """Schema, fake and autograd registrations agree, so torch.compile and export can trace."""
    q, k, v, g, state = (x.requires_grad_() for x in make("key", 7))
    for arguments in ((q, k, v, g, state, 0.5, False), (q, k, v, None, state, 0.5, False)):
        torch.library.opcheck(
            torch.ops.edgelin.linear.default,
            arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


@pytest.mark.parametrize("decay", DECAYS)
def test_backward_fake(decay):
    """The backward op's fake has the layout of its results (opcheck cannot look into vjp)."""
    q, k, v, g, state = make(decay, 7)
    arguments = (q, k, v, g, state, 0.5, False, torch.ones_like(v), state, [])
    real = torch.ops.edgelin.linear_backward(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        fake = torch.ops.edgelin.linear_backward(*fakes)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("decay", DECAYS)
def test_normalizer(decay):
    q, k, v, g, state = make(decay, 65, batch=3)
    q, k = q.abs(), k.abs()
    z = torch.rand(3, 2, 6)
    o, final, z_final = linear(q, k, v, g, state, scale=0.3, normalizer=z, eps=1e-3)
    numerator, want_final = loop(q, k, v, g, state, 0.3)
    sums, want_z = loop(q, k, torch.ones_like(v[..., :1]), g, z[..., None], 0.3)
    assert error(o, numerator / (sums + 1e-3)) < 2e-6
    assert error(final, want_final) < 2e-6
    assert error(z_final, want_z[..., 0]) < 2e-6


@pytest.mark.parametrize("decay", DECAYS)
def test_floor_of_the_normalizer(decay):
    """Sums of both signs, some below the floor."""
    q, k, v, g, state = make(decay, 65, batch=3)
    torch.manual_seed(8)
    z, floor = torch.randn(3, 2, 6), torch.rand(3, 65, 2)
    o, *_ = linear(q, k, v, g, state, scale=0.3, normalizer=z, floor=floor, eps=1e-3)
    numerator, _ = loop(q, k, v, g, state, 0.3)
    sums, _ = loop(q, k, torch.ones_like(v[..., :1]), g, z[..., None], 0.3)
    small = sums.abs() < floor[..., None]
    assert (sums < 0).any() and small.any() and not small.all()
    assert error(o, numerator / (torch.where(small, floor[..., None], sums.abs()) + 1e-3)) < 2e-6
    with pytest.raises(ValueError, match="floor is given without a normalizer"):
        linear(q, k, v, g, state, floor=floor)


def test_bfloat16_values_keep_a_float32_state():
    """Sums of ones, which a state of 8 bits of mantissa stops counting at 256."""
    ones, state = torch.ones(1, 50, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 2)
    for _ in range(13):
        o, state = linear(ones, ones, ones, None, state, scale=1.0)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (state == 650).all()  # which bfloat16 has not


def test_output_types():
    """The output has the type of v, whatever the rest; the state stays float32."""
    q, k, v, g, state = make("head", 9)
    for normalizer in (None, torch.rand(1, 2, 6)):
        results = linear(q, k, v.bfloat16(), g, state, normalizer=normalizer)
        assert results[0].dtype == torch.bfloat16
        assert all(x.dtype == torch.float32 for x in results[1:])


@pytest.mark.parametrize("which", [0, 2, 3, 4])
def test_wrong_shapes(which):
    inputs = list(make("key", 4))
    inputs[which] = inputs[which][..., :-1] if which != 2 else inputs[which][0]
    with pytest.raises(ValueError, match="need"):
        linear(*inputs)


def run_kernel(inputs, scale, device):
    """Forward and all gradients of the kernels, named, and the truth."""
    from edgelin.recurrences.linear import kernel, kernel_backward

    q, _, v, g, state = inputs
    rng = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=rng).to(x.dtype) for x in (v, state)]
    moved = [None if x is None else x.to(device) for x in inputs]
    *results, kept = kernel.forward(*moved, scale)
    assert [x.shape for x in kept] == [x.shape for x in kernel.allocate(*moved[:3])]
    ups = [x.to(device) for x in grads]
    found = kernel_backward.backward(*moved, scale, *ups, kept)
    assert all(map(torch.equal, found, kernel_backward.backward(*moved, scale, *ups)))
    if g is None:
        assert found[3].numel() == 0
        found = (*found[:3], found[4])
    else:
        assert found[3].dtype == torch.float32
    assert [x.dtype for x in (*results, *found[:3])] == [q.dtype, torch.float32, *[q.dtype] * 3]
    want, true_results = true_gradients(inputs, scale, grads)
    if g is not None:
        # A decay's gradient is a sum of q dq - k dk, so these products set its rounding error.
        noise = (q.double() * want[0]).abs().max() / want[3].abs().max()
        limit = 1.0 / max(1.0, float(noise))
    names = ["o", "state", "dq", "dk", "dv", *(["dg"] if g is not None else []), "dstate"]
    return {
        name: error(got, right) * (limit if name == "dg" else 1.0)
        for name, got, right in zip(names, (*results, *found), (*true_results, *want), strict=True)
    }


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("time, batch, heads", [(1, 3, 1), (65, 3, 1), (130, 1, 2)])
def test_kernel(time, batch, heads, decay, device, short_segments):
    inputs = make(decay, time, batch=batch, heads=heads, key=20, value=12)
    errors = run_kernel(inputs, 0.3, device)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("hard", HARD)
def test_kernel_hard_decays(hard, decay, device, short_segments):
    errors = run_kernel(make(decay, 70, heads=1, hard=hard), 0.3, device)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("decay", DECAYS)
def test_kernel_bfloat16(decay, device, short_segments):
    inputs = make(decay, 65, heads=1, key=20, value=12, dtype=torch.bfloat16)
    errors = run_kernel(inputs, 0.3, device)
    assert max(errors.values()) < 2e-2, errors


@pytest.mark.parametrize("hard", ["front", "mix"])
def test_kernel_bfloat16_hard_decays(hard, device, short_segments):
    """Segments with decays of any size beside segments where they are mild."""
    inputs = make("key", 200, heads=1, key=20, value=12, dtype=torch.bfloat16, hard=hard)
    errors = run_kernel(inputs, 0.3, device)
    assert max(errors.values()) < 2e-2, errors


@pytest.mark.parametrize("decay", DECAYS)
def test_kernel_shared_queries_and_keys(decay, device, short_segments):
    """Expanded from one head, as in Mamba-2: read once, with gradients for every head."""
    q, k, *rest = make(decay, 65, batch=2, heads=3, key=20, value=12)
    q, k = (x[:, :, :1].expand(-1, -1, 3, -1) for x in (q, k))
    errors = run_kernel((q, k, *rest), 0.3, device)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("decay", DECAYS)
def test_kernel_normaliser(decay, device):
    """V = 1 with bfloat16 queries and float32 values, as the normaliser calls it."""
    from edgelin.recurrences.linear import kernel

    q, k, v, g, state = make(decay, 33, value=1, dtype=torch.bfloat16)
    inputs = (q, k, torch.ones(v.shape), g, state)
    *results, _ = kernel.forward(*(None if x is None else x.to(device) for x in inputs), 0.3)
    for got, want in zip(results, loop(*inputs, 0.3), strict=True):
        assert got.dtype == torch.float32
        assert error(got, want) < 5e-6


def test_kernel_strided_inputs(device):
    """Views such as the parts of a fused projection are read as they are meant."""
    from edgelin.recurrences.linear import kernel

    q, k, v, g, state = make("key", 20, key=6, value=6)
    packed = torch.cat([q, k, v], -1).to(device)
    parts = packed.split(6, -1)
    turned = g.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    o, *_ = kernel.forward(*parts, turned, state.to(device), 1.0)
    assert error(o, loop(q, k, v, g, state, 1.0)[0]) < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key, value", [(64, 64), (128, 128), (64, 128), (128, 1), (256, 256)])
@pytest.mark.parametrize("time", [130, 300, 1024])
def test_kernel_sizes(time, key, value, dtype, decay, device):
    if value == 1 and dtype == torch.bfloat16:
        pytest.skip("edgelin.recurrences.widths never gives this to a kernel")
    inputs = make(decay, time, batch=2, key=key, value=value, dtype=dtype)
    errors = run_kernel(inputs, key**-0.5, device)
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else 3e-2), errors


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
def test_op_on_gpu(decay, device):
    """The public function under autograd on the GPU, with the normaliser."""
    inputs = make(decay, 200, batch=2, key=64, value=64)
    z = torch.rand(2, 2, 64)
    gradients = []
    for place, dtype in ((device, torch.float32), ("cpu", torch.float64)):
        leaves = [None if x is None else x.to(place, dtype).requires_grad_() for x in inputs]
        normalizer = z.to(place, dtype).requires_grad_()
        q, k, *rest = leaves
        o, final, z_final = linear(q.abs(), k.abs(), *rest, scale=0.1, normalizer=normalizer)
        (o.sum() + final.square().sum() + z_final.square().sum()).backward()
        gradients.append([x.grad for x in (*leaves, normalizer) if x is not None])
    for got, want in zip(*gradients, strict=True):
        assert error(got, want) < 2e-5


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", [linear_onnx.plain, linear_onnx.fused])
def test_onnx(form, decay):
    session = onnx_session(form, decay, 2, 6, 5, 0.3)
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
        onnx_run(onnx_session(linear_onnx.plain, decay, 2, 6, 5, 1.0), inputs)
    got = onnx_run(onnx_session(linear_onnx.fused, decay, 2, 6, 5, 1.0), inputs)
    assert error(got[0], loop(*inputs, 1.0)[0]) < 2e-6


@pytest.mark.parametrize("decay", DECAYS)
def test_onnx_chain(decay):
    """Ragged calls of both forms, state fed back, against one long loop; V = 1 as for z."""
    q, k, v, g, start = make(decay, 130, value=1)
    want = loop(q, k, v, g, start, 1.0)
    for form in (linear_onnx.plain, linear_onnx.fused):
        session = onnx_session(form, decay, 2, 6, 1, 1.0)
        state, parts = start, []
        for a, b in ((0, 64), (64, 65), (65, 98), (98, 130)):
            part = [None if x is None else x[:, a:b].contiguous() for x in (q, k, v, g)]
            o, state = onnx_run(session, [*part, state])
            parts.append(o)
        assert error(torch.cat(parts, 1), want[0]) < 2e-6
        assert error(state, want[1]) < 2e-6


def test_onnx_shares_tables():
    """A second layer adds no constant and no table."""
    counts = []
    for layers in (1, 2):
        graph = Graph(ir.Value(name="time"))
        shape = {"heads": 2, "key_dim": 6, "value_dim": 5, "decay": "key", "scale": 0.5}
        for _ in range(layers):
            linear_onnx.plain(graph, *(ir.Value(name=n) for n in "qkvgs"), **shape)
        counts.append((len(graph.preamble), len(graph.initializers)))
    assert counts[0] == counts[1]


def test_onnx_shares_decays_with_delta():
    """A graph with both recurrences makes the decays' tables once."""
    shape = {"heads": 2, "key_dim": 6, "value_dim": 5, "decay": "head", "scale": 0.5}
    delta_alone, both = Graph(ir.Value(name="time")), Graph(ir.Value(name="time"))
    linear_onnx.plain(both, *(ir.Value(name=n) for n in "qkvgs"), **shape)
    for graph in (delta_alone, both):
        delta_onnx.plain(graph, *(ir.Value(name=n) for n in "qkvbgs"), **shape)
    assert len(both.preamble) == len(delta_alone.preamble)


def test_fused_scale():
    values = [ir.Value(name=n) for n in "qkv"]
    shape = {"heads": 2, "key_dim": 6, "value_dim": 5, "decay": "none"}
    with pytest.raises(ValueError, match="scale"):
        linear_onnx.fused(Graph(), *values, None, ir.Value(name="s"), **shape, scale=0.0)
