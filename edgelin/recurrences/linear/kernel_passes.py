"""Triton kernels of the linear recurrence: the pass over a segment.

Time is cut into segments. When there are several, ``kernel_segments.py`` makes the state before
each, and `attend` runs over all segments in parallel, chunk by chunk (equations in ``chunked.py``).

One kernel serves the output and all gradients. With rows y (width Y, the side that decays) and x
(width X), the state is H = sum of x_t y_t^T, decayed along Y, and a row a_i reads it:

    inner (a along Y): out_i = sum_j (a_i . exp(G_i - G_j) y_j) x_j    o, and dv backwards in time
    outer (a along X): out_i = sum_j (a_i . x_j) exp(G_i - G_j) y_j    dq, and dk backwards in time

where j <= i, or j >= i backwards with exp(G_j - G_i). Backwards, the state is the gradient of the
one after a token. Queries and keys, the rows along Y, may be one head's for all (HY = 1).

A decay a head is applied to scores and rows. One a key is taken out beforehand: ``split`` writes
q exp(G_i - G_m) and k exp(G_m - G_j), m the middle of the chunk, and between these rows there is no
decay but that of the state over half chunks, which a pass applies where chunks meet. A segment
where some key decays too fast for that is marked, left out here, and done by ``kernel_by_key.py``.

The gradient of the decay needs no sum over all of time: at the end of a segment it is the product
of the state there and the state's gradient, S . dS, and within one
dg_t = dg_{t+1} + q_t dq_t - k_t dk_t.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.linear.kernel_decays import (
    FLOOR,
    HEAD,
    KEY,
    _sums,
    load_rows,
    nearest,
    store_rows,
    upper,
)
from edgelin.recurrences.linear.kernel_places import COLUMNS, ends_row, number_of, place
from edgelin.recurrences.linear.kernel_segments import halves, head_decays


@triton.jit
def _differences(sums, scale, REV: tl.constexpr):
    """scale * 2^(G_i - G_j) `[BT, BT]`, backwards 2^(G_j - G_i), float32, of any size where j > i.

    Heads and tails of float64 sums are subtracted apart: close heads exactly, so that nothing
    cancels.
    """
    head, log_scale = sums.to(tl.float32), tl.log2(scale)
    if sums.dtype == tl.float64:
        tail = (sums - head.to(tl.float64)).to(tl.float32)
        apart = head[:, None] - head[None, :] + (tail[:, None] - tail[None, :])
        return tl.exp2(-apart if REV else apart) * scale
    elif REV:
        return tl.exp2(head[None, :] - (head - log_scale)[:, None])
    else:
        return tl.exp2((head + log_scale)[:, None] - head[None, :])


@triton.jit
def _decay_gradient(p, weight, g, carry, live, H: tl.constexpr, REV: tl.constexpr):
    """A head's: dq stores q dq, dk (backwards) takes k dk off and sums up; the new carry."""
    if REV:
        weight = tl.load(p, mask=live, other=0.0) - weight
        weight = tl.where(live, weight, 0.0)
        kept = tl.load(g, mask=live, other=0.0).to(tl.float32) >= FLOOR
        sums = carry + tl.cumsum(weight, axis=0, reverse=True)
        carry += tl.sum(weight, axis=0)
        weight = tl.where(kept, sums, 0.0)
    tl.store(p, weight, mask=live)
    return carry


@triton.jit
def _exactly(b_a, state, DT: tl.constexpr):
    """a S `[BT, BY]` with S in two parts of DT.

    The decay's gradient is a long sum of q dq - k dk, which cancels only if both passes multiply
    the same numbers: S as it was added up, not rounded.
    """
    high = upper(state)
    acc = tl.dot(b_a, (state - high).to(DT), input_precision="ieee")
    return tl.dot(b_a, high.to(DT), acc, input_precision="ieee")


@triton.jit
def _lack(acc, b_m, reads):
    """What a S times the rows of m lacks `[BT]`, likewise: these rows, with a decay a head, as the
    other pass rounds them before it adds them to its state."""
    rows = b_m.to(tl.float32) * reads[:, None]
    return tl.sum(acc * (nearest(rows) - rows), axis=1)


@triton.jit
def _step(
    b_a, b_x, b_y, b_m, extra, state, z, seen, scale, sums_g, row, o_t,
    BT: tl.constexpr, MODE: tl.constexpr, INNER: tl.constexpr, REV: tl.constexpr,
    EXACT: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Outputs `[BT, BX or BY]` of a chunk and of one more column of x `[BT]` times ``scale``, what
    :func:`_lack` says, and the states `[BX, BY]` and `[BY]` after it."""
    sums, lack = tl.zeros_like(extra), tl.zeros_like(extra)
    if MODE == HEAD:
        exponents, reads, adds, total = head_decays(sums_g, row, o_t, BT, REV)
    if INNER:
        acc = tl.dot(b_a, tl.trans(state.to(DT)), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_y), input_precision="ieee")
        if NORM:
            sums = tl.sum(b_a.to(tl.float32) * z[None, :], axis=1)
    else:
        if EXACT:
            acc = _exactly(b_a, state, DT)
            if MODE == HEAD:
                lack = _lack(acc, b_m, reads) * scale
        else:
            acc = tl.dot(b_a, state.to(DT), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_x), input_precision="ieee")
        if NORM:  # the column is of ones and of ``extra``: dq has the latter on the side of a
            acc += z[None, :] if REV else extra[:, None] * z[None, :]
            scores += extra[None, :] if REV else extra[:, None]
    if MODE == HEAD:
        reads *= scale
        acc *= reads[:, None]
        sums *= reads
        scores *= _differences(exponents, scale, REV)
    scores = tl.where(seen, scores, 0.0)
    if NORM and INNER:
        sums += tl.sum(scores, axis=1)
    scores = scores.to(DT)
    if INNER:
        acc = tl.dot(scores, b_x, acc, input_precision="ieee")
    else:
        acc = tl.dot(scores, b_y, acc, input_precision="ieee")
    if MODE != HEAD:
        acc *= scale
        sums *= scale
    if MODE == HEAD:
        state *= total
        z *= total
    if MODE == HEAD and INNER and not NORM:  # of x there is less than of y
        b_x = (b_x.to(tl.float32) * adds[:, None]).to(DT)
    elif MODE == HEAD or NORM:
        added = b_y.to(tl.float32)
        if MODE == HEAD:
            added *= adds[:, None]
            b_y = added.to(DT)
        if NORM:
            z += tl.sum(added * extra[:, None] if REV else added, axis=0)
    return acc, sums, lack, tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee"), z


@triton.jit
def sum_back(w, weight, carry, seen, rows, cols, live, H: tl.constexpr, Y: tl.constexpr,
             PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Decay gradients `[BT, BY]`: q dq of ``w`` less k dk, summed from the end; the new carry."""
    weight = load_rows(w, rows, cols, live, H, Y) - weight
    total = tl.sum(weight, axis=0)
    return carry[None, :] + _sums(seen, weight, PT, PARTS), carry + total


@triton.jit
def load_state(p, o_x, o_y, X: tl.constexpr, Y: tl.constexpr):
    """Load a state `[BX, BY]`."""
    mask = (o_x[:, None] < X) & (o_y[None, :] < Y)
    return tl.load(p, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def end_product(ends, last, i_n, is_last, cells, o_x, o_y, state, scale,
                X: tl.constexpr, Y: tl.constexpr):  # fmt: skip
    """S . dS `[BY]` at the end of a segment, from which its decay gradients are summed: S is at
    ``cells`` of ``ends``, before the next segment, or the ``last`` one."""
    if is_last:
        p_last = last + i_n.to(tl.int64) * (X * Y) + o_x[:, None] + o_y[None, :] * X
        end = load_state(p_last, o_x, o_y, X, Y)
    else:
        end = load_state(ends + cells, o_x, o_y, X, Y)
    return tl.sum(end * state, axis=0) * scale


@triton.jit
def _key_gradients(
    w, g, token, acc, weight, carry, seen, o_t, o_y, live,
    H: tl.constexpr, Y: tl.constexpr, REV: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dq, and q dq to ``w``; or dk, and there the decay's gradient. The new carry."""
    exponents = load_rows(g + token * Y, o_t, o_y, live, H, Y)
    w += token * Y
    if REV:
        acc *= tl.exp2(-exponents)
        weight, carry = sum_back(w, weight, carry, seen, o_t, o_y, live, H, Y, PT, PARTS)
    else:
        acc *= tl.exp2(exponents)
    store_rows(w, weight, o_t, o_y, live, H, Y)
    return acc, carry


@triton.jit
def _rows(
    a, x, y, token, shared, o_t, o_x, o_y, live,
    H: tl.constexpr, HY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, INNER: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Rows of a chunk, of a, x and y."""
    if INNER:
        b_a = load_rows(a + shared * Y, o_t, o_y, live, HY, Y).to(DT)
    else:
        b_a = load_rows(a + token * X, o_t, o_x, live, H, X).to(DT)
    b_x = load_rows(x + token * X, o_t, o_x, live, H, X).to(DT)
    return b_a, b_x, load_rows(y + shared * Y, o_t, o_y, live, HY, Y).to(DT)


@triton.jit
def _put_rows(out, acc, token, o_t, o_x, o_y, live, H: tl.constexpr, X: tl.constexpr,
              Y: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """Store the outputs of a chunk."""
    if INNER:
        store_rows(out + token * X, acc, o_t, o_x, live, H, X)
    else:
        store_rows(out + token * Y, acc, o_t, o_y, live, H, Y)


@triton.jit
def _vector(p, o_y, Y: tl.constexpr):
    """A state of the column `[BY]`."""
    return tl.load(p + o_y, mask=o_y < Y, other=0.0).to(tl.float32)


@triton.jit
def _weigh(
    w, g, m, token, part, acc, lack, carry, seen, o_t, o_y, live,
    H: tl.constexpr, HY: tl.constexpr, Y: tl.constexpr, MODE: tl.constexpr, REV: tl.constexpr,
    PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a pass gives the decay's gradient, for a head to the ``part`` of ``w`` of its block."""
    weight = acc * load_rows(m, o_t, o_y, live, HY, Y).to(tl.float32)
    if MODE == HEAD:
        p_w, p_g = w + part + token + o_t * H, g + token + o_t * H
        carry = _decay_gradient(p_w, tl.sum(weight, axis=1) + lack, p_g, carry, live, H, REV)
    else:
        acc, carry = _key_gradients(
            w, g, token, acc, weight, carry, seen, o_t, o_y, live, H, Y, REV, PT, PARTS
        )
    return acc, carry


@triton.jit
def _between(state, enter, leave, row, n, goes_on, o_y, T,
             Y: tl.constexpr, BT: tl.constexpr, REV: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The state after chunk ``n``, decayed to the middle of the next one if there is one."""
    log_decay = halves(leave, row, n, o_y, T, Y, BT, STEP)
    if goes_on:
        log_decay += halves(enter, row, n - 1 if REV else n + 1, o_y, T, Y, BT, STEP)
    return state * tl.exp(log_decay)[None, :]


@triton.jit
def _divided(acc, sums, eps, p_sums, p_floor, live, is_first, FLOORED: tl.constexpr):
    """The output over its denominator; the first block of X leaves the sums."""
    if is_first:
        tl.store(p_sums, sums, mask=live)
    if FLOORED:
        sums = tl.maximum(tl.abs(sums), tl.load(p_floor, mask=live, other=0.0))
    return acc / (sums + eps)[:, None]


@triton.jit
def _column(h_z, ends_z, last_z, i_n, is_last, p_z, apart, o_y, h_scale, out_scale,
            Y: tl.constexpr, WEIGHS: tl.constexpr):  # fmt: skip
    """z before a segment `[BY]`, and what it adds to :func:`end_product`."""
    z = _vector(h_z + p_z, o_y, Y) * h_scale
    carry = tl.zeros_like(z)
    if WEIGHS:
        if is_last:
            end = _vector(last_z + i_n * Y, o_y, Y)
        else:
            end = _vector(ends_z + p_z + apart, o_y, Y)
        carry = end * z * out_scale
    return z, carry


@triton.jit
def put_last(final, state, i_n, o_x, o_y, X: tl.constexpr, Y: tl.constexpr):
    """Store the state `[BX, BY]` behind the last segment."""
    p = final + i_n.to(tl.int64) * (X * Y) + o_x[:, None] + o_y[None, :] * X
    tl.store(p, state, mask=(o_x[:, None] < X) & (o_y[None, :] < Y))


@triton.jit
def _finish(
    state, z, final, final_z, pid, places, T, chunks, out_scale, i_n, i_s, first, count, is_first,
    o_x, o_y,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BT: tl.constexpr,
    REV: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Store the states behind the last segment, if this is it; z if it is the first block of X."""
    if PACKED:  # read again: over the loop these numbers would hold registers
        i_n, _h, _r, i_s, _b, T, first, count, _row = place(pid, places, T, chunks, H, BT, PACKED)
    if ends_row(i_s, first, count, T, BT, REV, PACKED):
        factor = out_scale if REV else 1.0
        put_last(final, state * factor, i_n, o_x, o_y, X, Y)
        if NORM:
            tl.store(final_z + i_n * Y + o_y, z * factor, mask=(o_y < Y) & is_first)


@triton.jit
def attend(
    a, x, y, g, enter, leave, far, h, ends, last, out, final, m, w,
    column, h_z, ends_z, last_z, final_z, floor, places, T, chunks, h_scale, out_scale,
    s_b, s_s, s_x, s_y, s_w, eps,
    H: tl.constexpr, HY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, INNER: tl.constexpr, REV: tl.constexpr, WEIGH: tl.constexpr,
    NORM: tl.constexpr, FLOORED: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment of one head, for one block of the output's width.

    With NORM there is one more column of x, of ones, whose state is the normaliser z. The pass of
    the output divides by what z gives and leaves it in ``column``; the other passes find its
    gradient there. ``enter`` holds sums of decays: of keys over half chunks, of heads by token.
    """
    EXACT: tl.constexpr = WEIGH and DT == tl.bfloat16
    blocks: tl.constexpr = (X + BX - 1) // BX if INNER else (Y + BY - 1) // BY
    pid, i_o = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_n, i_h, i_r, i_s, before, T, first, count, row = place(pid, places, T, chunks, H, BT, PACKED)
    if MODE == KEY:
        if tl.load(far + number_of(i_r, i_s, tl.num_programs(1), H, PACKED)) != 0:
            return
    step: tl.constexpr = H if PACKED else 1
    o_t = tl.arange(0, BT)
    o_x = tl.arange(0, BX) + (i_o * BX if INNER else 0)
    o_y = tl.arange(0, BY) + (0 if INNER else i_o * BY)
    seen = o_t[None, :] >= o_t[:, None] if REV else o_t[None, :] <= o_t[:, None]
    slot = i_r.to(tl.int64) * s_b + i_s.to(tl.int64) * s_s
    cells = slot + o_x[:, None] * s_x + o_y[None, :] * s_y
    state = load_state(h + cells, o_x, o_y, X, Y) * h_scale
    z, extra = tl.zeros([BY], dtype=tl.float32), tl.zeros([BT], dtype=tl.float32)
    carry, is_last = tl.zeros_like(z), ends_row(i_s, first, count, T, BT, False, PACKED)
    if NORM:  # the states of z lie as those of a column do, X times as close
        z, carry = _column(h_z, ends_z, last_z, i_n, is_last, slot // X, s_s // X, o_y, h_scale,
                           out_scale, Y, WEIGH and REV)  # fmt: skip
    if WEIGH and REV:
        cells += s_s
        carry += end_product(ends, last, i_n, is_last, cells, o_x, o_y, state, out_scale, X, Y)
    if MODE == HEAD:
        carry = tl.sum(carry, axis=0)
    if MODE == KEY:
        n = first + (tl.maximum(count, 1) - 1 if REV else 0)
        state *= tl.exp(halves(enter, row, n, o_y, T, Y, BT, step))[None, :]
    s_w = tl.load(places + COLUMNS - 1) * H if PACKED else s_w
    for c in range(0, count):
        n = first + (count - 1 - c if REV else c)
        live = n * BT + o_t < T
        token = (before + n * BT) * H + i_h
        shared = token if H == HY else token // H
        b_a, b_x, b_y = _rows(a, x, y, token, shared, o_t, o_x, o_y, live, H, HY, X, Y, INNER, DT)
        if NORM and not INNER:
            extra = tl.load(column + token + o_t * H, mask=live, other=0.0)
        p_m = m + shared * Y
        b_m = load_rows(p_m, o_t, o_y, live, HY, Y) if EXACT and MODE == HEAD else b_y
        acc, sums, lack, state, z = _step(
            b_a, b_x, b_y, b_m, extra, state, z, seen, out_scale, enter, row + n * step, o_t,
            BT, MODE, INNER, REV, EXACT, NORM, DT,
        )  # fmt: skip
        if MODE == KEY:
            state = _between(state, enter, leave, row, n, c + 1 < count, o_y, T, Y, BT, REV, step)
        if NORM and INNER:
            p_c, p_f = column + token + o_t * H, floor + token + o_t * H
            acc = _divided(acc, sums, eps, p_c, p_f, live, i_o == 0, FLOORED)
        if WEIGH:
            part = i_o.to(tl.int64) * s_w
            acc, carry = _weigh(
                w, g, p_m, token, part, acc, lack, carry, seen, o_t, o_y, live,
                H, HY, Y, MODE, REV, PT, PARTS,
            )  # fmt: skip
        _put_rows(out, acc, token, o_t, o_x, o_y, live, H, X, Y, INNER)
    _finish(
        state, z, final, final_z, pid, places, T, chunks, out_scale, i_n, i_s, first, count,
        (not INNER) | (i_o == 0), o_x, o_y, H, X, Y, BT, REV, NORM, PACKED,
    )  # fmt: skip
