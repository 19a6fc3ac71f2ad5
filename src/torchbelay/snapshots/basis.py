"""The averages that are worth recording: others can be made from them."""

from torchbelay.physics.methods import power_ema


def defaults() -> dict[str, power_ema]:
    """Return two averages from which most others can be made: power functions of the widths 0.05 and 0.10.

    They cost one more pass over the weights each, and nothing has to be tuned: give them as `spectators`.

    Reference: Karras et al., "Analyzing and improving the training dynamics of diffusion models", 2024, §3.

    >>> {name: method.sigma_rel for name, method in defaults().items()}
    {'power_05': 0.05, 'power_10': 0.1}
    """
    return {"power_05": power_ema(sigma_rel=0.05), "power_10": power_ema(sigma_rel=0.10)}
