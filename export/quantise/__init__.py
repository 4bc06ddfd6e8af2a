"""Int8 and int4 weights: which matrix gets how many bits, and its codes.

Code map:

- ``recipe``: bits by the role of a tensor; ``rounding``: codes and scales of one matrix
- ``nodes``: from a graph's matrices to nodes that hold codes
- ``gptq``, ``calibrate``: codes that a text chooses; ``rollout``: the text, read layer by layer
- ``loss``, ``sensitivity``, ``speed``: what rounding costs, in all, a matrix, and a step's time
- ``auto``: bits within a budget; ``plan``: which of all this an export needs; ``plot``: the picture
"""
