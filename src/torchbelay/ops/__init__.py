"""Couplings applied to tensors. Nothing in here knows a spring or an optimizer: tensors and plain numbers only."""
