"""The curvatures of a loss as they were measured, and about how many directions have each."""

from dataclasses import dataclass

FAR = 0.1  # a negative curvature of more than this share of the largest: the loss is far from a quadratic


@dataclass(frozen=True)
class Spectrum:
    """Curvatures that stand for all of a loss, to be given to `recommend`.

    >>> Spectrum((2.0, 0.1), (1.0, 500.0), lowest=-0.5, products=12).caveats
    ('The loss curves downwards ... the model is far from a quadratic, and the advice is a guess.',)
    """

    curvatures: tuple[float, ...]  # the positive ones, the largest first
    counts: tuple[float, ...]  # about how many directions have each of them
    lowest: float  # the least curvature that was seen, negative if the loss curves downwards somewhere
    products: int  # the number of Hessian-vector products behind it
    optimizer: str = "SGD"  # whose steps meet these curvatures
    foreign: tuple[str, ...] = ()  # operations of the loss that are not torch's own
    beta1: float = 0.0  # the momentum of that optimizer

    @property
    def largest(self) -> float:
        """The largest curvature. It is approached from below."""
        return self.curvatures[0]

    @property
    def caveats(self) -> tuple[str, ...]:
        """Warnings of what makes advice from these curvatures doubtful."""
        found = []
        if self.lowest < -FAR * self.largest:
            found.append(
                f"The loss curves downwards in some directions, by {self.lowest:.3g} against {self.largest:.3g} "
                "upwards: the model is far from a quadratic, and the advice is a guess."
            )
        if self.foreign:
            found.append(
                f"The loss uses {', '.join(self.foreign)}, not torch's own: if the backward is a kernel, curvature is "
                "missing, and torch does not notice. Measure with plain operations."
            )
        return tuple(found)

    def explain(self) -> str:
        """Return what was measured, in words."""
        said = f"{self.products} Hessian-vector products: curvatures from {self.lowest:.3g} to {self.largest:.3g}, as "
        if self.optimizer == "SGD":
            return f"{said}SGD meets them. The learning rates below are for SGD."
        return f"{said}{self.optimizer} meets them at its present second moments."
