"""The rarer settings of a Belay, by their public name; they are defined in `torchbelay.belay.options`."""

from .belay.options import OptionArguments, Options

__all__ = ["OptionArguments", "Options"]
