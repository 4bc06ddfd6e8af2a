"""One file a mixer: ``CASES``, tables by name, and ``loop``, its float64 numpy truth.

A loop maps (mixer, x, state, position) to (y, state) and shares no code with the mixer: rotations
are complex products, attention is a softmax over a list of all tokens it may see.
"""
