"""Kernels in Triton's own language, one file per job. They read addresses and numbers from tables; see `layout`."""

from .copy import copy, exchange
from .look import look
from .move import move

__all__ = ["copy", "exchange", "look", "move"]
