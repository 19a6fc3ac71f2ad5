"""How curved the loss of a model is, by Hessian-vector products. Nothing here changes the model."""

from .measurement import measure_curvatures

__all__ = ["measure_curvatures"]
