"""What a device is doing: whether its work is being recorded in a graph."""

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether launches on this device are recorded in a CUDA graph, to run later, instead of running now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
