"""The command `torchbelay`, one file a verb. Nothing in here computes: it reads arguments and prints."""

from .main import main

__all__ = ["main"]
