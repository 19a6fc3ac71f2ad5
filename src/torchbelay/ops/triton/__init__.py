"""One launch for a whole model, whatever the number, shapes and dtypes of its tensors. The only place with kernels.

Nothing here is imported unless Triton is there and asked for: `torchbelay.ops.backend.choose` decides.
"""
