"""Weight averaging for PyTorch as two masses on a damped spring."""
