"""The recurrences: each a folder with its equation and its four forms.

Letters, the same everywhere: B batch, T time, H heads, K key width, V value width, D channels,
N state width a channel, C convolution channels.

Layouts: sequences ``[B, T, H, K]``, matrix state ``[B, H, K, V]``. A state is always an argument
and a result. State arithmetic is float32 (float64 when the inputs are); outputs have the dtype of
the values. Decays are log-space, natural logarithm, <= 0 and clamped at -90: a hard reset is -90.
"""

MIN_LOG_DECAY = -90.0
CHUNK = 64
