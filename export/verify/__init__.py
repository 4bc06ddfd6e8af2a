"""Proof that a bundle computes what its checkpoint does.

Code map:

- ``compare``: every form beside the recurrence in float64, and the graphs beside each other
- ``forms``, ``torch_forms``: what is fed, graphs and torch; ``inputs``: with which steps and states
- ``golden``: the stream that every bundle carries; ``streams``: rows of different lengths
- ``probe``: does every state matter; ``weights``, ``manifest``: are they the model's own
- ``activations``, ``quality``: what rounding may do to numbers and answers
- ``report``, ``record``: what was found, and its part of the bundle's report
"""
