"""Loop of the mixer ``lti``, in the states of the layer or in those of its diagonal export."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, matrix, sigmoid

TABLE = {"type": "lti", "inner_size": 10, "state_size": 5}
CASES: dict[str, dict[str, Any]] = {
    "lti, diagonal": TABLE,
    "lti, diagonal, bilinear": {**TABLE, "discretization": "bilinear", "state_size": 4},
    "lti, dense": {**TABLE, "init": "hippo-legs", "export_form": "dense"},
    "lti, dense, bilinear": {
        **TABLE,
        "init": "hippo-legt",
        "export_form": "dense",
        "discretization": "bilinear",
    },
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = matrix(m, "C")
    a, b, values, vectors = system(m)
    diagonal = "ssm_re.3" in state
    h = state["ssm_re.3"] + 1j * state["ssm_im.3"] if diagonal else state["ssm.3"]
    if diagonal:  # 1 is what B becomes, and of each pair one entry is kept
        read = np.einsum("dn,dne->de", c, vectors) * np.where(values.imag > 0, 2, 1)
        step, write = held(values, np.ones_like(values), matrix(m, "log_dt"), m.config)
    outputs = []
    for t in range(x.shape[1]):
        u, gate = np.split(x[:, t] @ matrix(m, "in_gate_proj.weight").T, 2, axis=-1)
        if diagonal:
            h = step * h + write * u[..., None]
            s = (read * h).sum(-1).real
        else:
            h = np.einsum("dnm,bdm->bdn", a, h) + b * u[..., None]
            s = (c * h).sum(-1)
        s = s + matrix(m, "D") * u
        outputs.append((s * gate * sigmoid(gate)) @ matrix(m, "out_proj.weight").T)
    after = {"ssm_re.3": h.real, "ssm_im.3": h.imag} if diagonal else {"ssm.3": h}
    return np.stack(outputs, axis=1), after


def system(m: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Discrete A and B by an eigenbasis, A's eigenvalues that are kept and their V with B' = 1."""
    w, root = matrix(m, "A_skew"), matrix(m, "A_root")
    a = w / 2 - w.swapaxes(1, 2) / 2 - root @ root.swapaxes(1, 2) - 1e-4 * np.eye(w.shape[-1])
    values, vectors = np.linalg.eig(a)
    inverse = np.linalg.inv(vectors)
    inputs = np.einsum("den,dn->de", inverse, matrix(m, "B"))
    step, write = held(values, inputs, matrix(m, "log_dt"), m.config)
    dense_a = np.einsum("dne,de,dem->dnm", vectors, step, inverse).real
    dense_b = np.einsum("dne,de->dn", vectors, write).real
    scaled, order = vectors * inputs[:, None], np.lexsort((values.real, values.imag), axis=1)
    order = order[:, (values.imag[0] < 0).sum() :]
    kept = np.take_along_axis(values, order, axis=1)
    return dense_a, dense_b, kept, np.take_along_axis(scaled, order[:, None], axis=2)


def held(
    values: np.ndarray, inputs: np.ndarray, log_dt: np.ndarray, config: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Discrete eigenvalues and input weights `[D, N]`."""
    dt = np.exp(log_dt)[:, None]
    if config.discretization == "zoh":
        return np.exp(dt * values), np.expm1(dt * values) / values * inputs
    return (2 + dt * values) / (2 - dt * values), 2 * dt / (2 - dt * values) * inputs
