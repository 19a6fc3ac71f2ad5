"""How four numbers move tensors. Springs, methods and optimizers are unknown here: tensors and plain numbers only."""
