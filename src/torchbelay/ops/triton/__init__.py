"""One launch for a whole model on a GPU, whatever the number, shapes and dtypes of its tensors.

Nothing here is imported unless Triton is installed and asked for: `torchbelay.ops.backend.choose` decides.
"""
