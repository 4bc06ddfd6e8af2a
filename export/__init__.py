"""From a checkpoint to a bundle that any runtime can run.

Code map:

- ``trace``: the model's step, once, as an ONNX graph with opaque recurrence nodes
- ``passes/``: graph transforms, one a file; ``profiles``: which operators a graph may use
- ``quantise/``: int8 and int4 weights; ``store``: the ``.onnx`` and ``.onnx_data`` files
- ``contract``: manifest and metadata; ``golden``: the stream that checks a runtime
- ``bundle``: everything in order, into a temporary folder, then renamed; ``report``: what was found
- ``verify/``: proof that a bundle computes what its checkpoint does
"""
