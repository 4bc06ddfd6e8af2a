"""The recurrences: each a folder with its equation and its four forms.

Letters, the same everywhere: B batch, T time, H heads, K key width, V value width, D channels,
N state width a channel, C convolution channels.

Layouts: sequences ``[B, T, H, K]``, matrix state ``[B, H, K, V]``. A state is always an argument
and a result. State arithmetic is float32 (float64 when the inputs are); outputs have the dtype of
the values. Decays are log-space, natural logarithm, <= 0 and clamped at -90: a hard reset is -90.

In a folder ``__init__.py`` has the function to call, its equation and its operator;
``reference.py`` the loop, ``chunked.py`` (``scan.py``) the parallel form in torch, ``onnx.py`` that
of exports. ``kernel.py`` is where to begin with the Triton kernels, ``kernel_backward.py`` with
those of the gradients; further ``kernel_*.py`` are their parts.

What they share, from the call to the GPU: ``arguments.py`` refuses what does not fit together,
``packed.py`` and ``lengths.py`` take sequences of different lengths, ``widths.py`` pads to widths
that kernels take, ``operator.py`` makes an operator of PyTorch, ``transforms.py`` adds
``torch.func`` to it, ``chunks.py`` has parts of the parallel forms, ``launches.py`` starts kernels
as ``launches.json`` says. For exports: ``exporting.py``, ``graph.py``, ``decay_graph.py`` and
``toeplitz_graph.py``.
"""

MIN_LOG_DECAY = -90.0
CHUNK = 64
