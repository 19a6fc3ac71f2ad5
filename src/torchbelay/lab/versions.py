"""The software and hardware that a result was made with."""

import platform

import torch

from torchbelay import __version__

from .part import Record


def versions(device: torch.device) -> Record:
    """Return the versions of the software, and the name of the device.

    >>> versions(torch.device("cpu"))["device"]
    'CPU'
    """
    return {
        "torchbelay": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }
