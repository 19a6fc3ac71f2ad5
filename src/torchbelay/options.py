"""The rarely used settings of `Belay`, under their public name; `torchbelay.belay.options` defines them."""

from .belay.options import OptionArguments, Options

__all__ = ["OptionArguments", "Options"]
