"""Feature maps phi of linear attention: phi(q) . phi(k) stands for a similarity of q and k.

    elu       elu(x) + 1                        Katharopoulos et al. 2020, arXiv:2006.16236, eq. 7
    identity  x                                 signed: needs an output norm
    relu      max(x, 0)                         Kasai et al. 2021, "Finetuning pretrained
                                                transformers into RNNs", arXiv:2103.13076, eq. 2
    product   (W_1 x + b_1) * (W_2 x + b_2)     signed; the flash-linear-attention code, whose
              learned, a head each              HadamardFeatureMap all heads share
    favor     exp(W^T x - |x|^2 / 2)            Choromanski et al. 2020, "Rethinking attention with
              for exp(q . k)                    Performers", arXiv:2009.14794, lemma 1, section 2.4
    taylor    1, x, x x^T packed, for           Arora et al. 2024, "Based", arXiv:2402.18668,
              1 + q . k + (q . k)^2 / 2         section 3.1; the kernel is never below 1/2
    hedgehog  softmax([W^T x, -W^T x])          Zhang et al. 2024, "The Hedgehog and the Porcupine",
              W learned, a head each            arXiv:2402.04347, section 4.1

favor and taylor take x / K^(1/4), so that q . k is softmax attention's q . k / sqrt(K).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32
from edgelin.recurrences.chunks import outside_autocast

_MOST_SEED = 1 << 62


class FeatureMap(nn.Module):
    """Maps queries and keys to features.

    Args:
        size: Features F of a query or key, a head.
    """

    signed = False  # whether a similarity may be negative, so that no sum of them can divide
    eps = 1e-6  # added to the sum that divides
    most_width: int | None = None  # of a key, for features within float32

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @classmethod
    def of(cls, num_heads: int, width: int, num_features: int | None) -> FeatureMap:
        """Build from the sizes that :func:`build` is given."""
        return cls(width)

    def forward(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Features of queries and keys, `[B, T, H, F]` each, in the dtype of ``qk``.

        Args:
            qk: Queries of all heads, then keys: `[B, T, 2 H, K]`.
        """
        with outside_autocast(qk.device.type):
            q, k = self.map(at_least_float32(qk))
        return q.to(qk.dtype), k.to(qk.dtype)

    def map(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, in float32 or float64 and outside autocast."""
        raise NotImplementedError


class Elu(FeatureMap):
    """elu(x) + 1 > 0, in the dtype of the stream."""

    def forward(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.forward`."""
        q, k = (F.elu(qk) + 1).chunk(2, dim=2)
        return q, k


class Relu(FeatureMap):
    """max(x, 0), in the dtype of the stream."""

    def forward(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.forward`."""
        q, k = F.relu(qk).chunk(2, dim=2)
        return q, k


class Identity(FeatureMap):
    """x itself."""

    signed = True

    def forward(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.forward`."""
        q, k = qk.chunk(2, dim=2)
        return q, k


class Favor(FeatureMap):
    """Positive random features: the mean of phi(q) . phi(k) over W is exp(q . k), up to a factor.

    W is block-orthogonal: each block of K columns has orthogonal directions and the lengths of
    independent normal vectors. ``projection`` `[1, K, M]` (heads share it) and ``seed`` are
    buffers of the checkpoint.

    A factor of a query alone, or of all keys, cancels in the normaliser and in an output norm. So
    1 / sqrt(M) is left out, and a query's features are divided by their largest, which keeps them
    in (0, 1]. A running maximum of the keys would have to rescale the state; with |k|^2 / 2 taken
    off, a key's exponent never exceeds |w|^2 / 2, about K / 2, which float32 holds for K up to 96.
    Large keys have tiny features, so that what is added to their sum has to be tinier still.

    Args:
        width: K.
        num_features: M.
    """

    eps = 1e-30
    most_width = 96
    projection: Tensor
    seed: Tensor

    def __init__(self, width: int, num_features: int) -> None:
        super().__init__(num_features)
        self.width = width
        self.register_buffer("projection", torch.zeros(1, width, num_features))
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.redraw(int(torch.randint(_MOST_SEED, (), device="cpu")))

    @classmethod
    def of(cls, num_heads: int, width: int, num_features: int | None) -> FeatureMap:
        """See :meth:`FeatureMap.of`."""
        return cls(width, num_features or 4 * width)

    def redraw(self, seed: int) -> None:
        """Replace W by the one of ``seed``; its last bits may be another machine's."""
        drawn = _orthogonal_blocks(self.width, self.size, seed)
        with torch.no_grad():
            self.projection.copy_(drawn[None])
            self.seed.fill_(seed)

    def map(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.map`."""
        scaled = qk * self.width**-0.25
        q, k = torch.matmul(scaled, self.projection).chunk(2, dim=2)
        keys = scaled.chunk(2, dim=2)[1]
        offset = keys.square().sum(-1, keepdim=True) / 2
        return (q - q.amax(-1, keepdim=True)).exp(), (k - offset).exp()


class Taylor(FeatureMap):
    """exp's series to degree 2, each pair of channels once: F = 1 + K + K (K + 1) / 2.

    The features are products of two linear maps of x, of which each column picks a channel or is
    the constant 1: matrix products run faster than gathers, on a CPU and backwards on a GPU.

    Args:
        width: K.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, width: int) -> None:
        rows, columns = torch.triu_indices(width, width)
        super().__init__(1 + width + len(rows))
        # Channel K is the constant 1. x_i x_j stands twice in (q . k)^2, x_i^2 once.
        first = torch.cat([torch.full((1 + width,), width), rows])
        second = torch.cat([torch.tensor([width]), torch.arange(width), columns])
        ones, linear = torch.ones(1), torch.full((width,), width**-0.25, dtype=torch.float64)
        pairs = (1 + (0.5**0.5 - 1) * (rows == columns).double()) * width**-0.5
        picked = (torch.cat([first, second])[:, None] == torch.arange(width + 1)).double()
        picked[self.size :] *= torch.cat([ones, linear, pairs])[:, None]
        # Float64, for models that are; three axes, or a quantised graph would round the matrix.
        self.register_buffer("weight", picked[:, :width].T[None].contiguous(), persistent=False)
        self.register_buffer("bias", picked[:, width].contiguous(), persistent=False)

    def map(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.map`."""
        weight, bias = self.weight.to(qk.dtype), self.bias.to(qk.dtype)
        first, second = (torch.matmul(qk, weight) + bias).chunk(2, dim=-1)
        q, k = (first * second).chunk(2, dim=2)
        return q, k


class Hedgehog(FeatureMap):
    """A learned matrix for the queries and keys of each head, the identity at first; F = 2 K.

    Args:
        num_heads: H.
        width: K.
    """

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__(2 * width)
        self.weight = nn.Parameter(torch.eye(width).repeat(2 * num_heads, 1, 1))

    @classmethod
    def of(cls, num_heads: int, width: int, num_features: int | None) -> FeatureMap:
        """See :meth:`FeatureMap.of`."""
        return cls(num_heads, width)

    def map(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.map`."""
        x = torch.matmul(qk.transpose(1, 2), self.weight)
        features = torch.cat([x, -x], dim=-1).softmax(-1).transpose(1, 2)
        q, k = features.chunk(2, dim=2)
        return q, k


class Product(FeatureMap):
    """The product of two learned affine maps for the queries and keys of each head; F = K.

    Args:
        num_heads: H.
        width: K.
    """

    signed = True

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__(width)
        bound = width**-0.5  # as torch.nn.Linear
        self.weight = nn.Parameter(
            torch.empty(2 * num_heads, width, 2 * width).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.empty(2 * num_heads, 1, 2 * width).uniform_(-bound, bound))

    @classmethod
    def of(cls, num_heads: int, width: int, num_features: int | None) -> FeatureMap:
        """See :meth:`FeatureMap.of`."""
        return cls(num_heads, width)

    def map(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`FeatureMap.map`."""
        both = torch.matmul(qk.transpose(1, 2), self.weight) + self.bias
        first, second = both.chunk(2, dim=-1)
        q, k = (first * second).transpose(1, 2).chunk(2, dim=2)
        return q, k


_MAPS: dict[str, type[FeatureMap]] = {
    "elu": Elu,
    "identity": Identity,
    "relu": Relu,
    "product": Product,
    "favor": Favor,
    "taylor": Taylor,
    "hedgehog": Hedgehog,
}
NAMES = tuple(_MAPS)


def find(name: str, width: int) -> type[FeatureMap]:
    """The class of a feature map, for keys of this width; nothing is drawn or stored.

    Raises:
        EdgelinError: There is no such map, or it takes no keys so wide.
    """
    if name not in _MAPS:
        raise EdgelinError(f"feature_map is {name!r}; allowed: {', '.join(NAMES)}")
    most = _MAPS[name].most_width
    if most is not None and width > most:
        raise EdgelinError(
            f"key_dim is {width}; feature_map {name!r} takes at most {most}: its features would "
            f"leave the range of float32"
        )
    return _MAPS[name]


def build(name: str, *, num_heads: int, width: int, num_features: int | None) -> FeatureMap:
    """The feature map of this name.

    Args:
        name: One of ``NAMES``.
        num_heads: H.
        width: Width K of a query or key.
        num_features: Features of "favor"; None: 4 K.

    Raises:
        EdgelinError: As :func:`find`.
    """
    return find(name, width).of(num_heads, width, num_features)


def _orthogonal_blocks(width: int, count: int, seed: int) -> Tensor:
    """``count`` columns `[width, count]`, each normal on its own, orthogonal within a block."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, math.ceil(count / width), width, width)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    directions, upper = torch.linalg.qr(normal[0])
    # Signs of R's diagonal make Q uniform (Mezzadri 2007, arXiv:math-ph/0609050, section 5).
    directions = directions * upper.diagonal(dim1=1, dim2=2).sign()[:, None]
    columns = directions * normal[1].norm(dim=1)[:, None]
    matrix: Tensor = columns.transpose(0, 1).flatten(1)[:, :count].float()
    return matrix


__all__ = ["NAMES", "FeatureMap", "build", "find"]
