"""The ledger: bytes that are alive at a time."""

import torch

from torchbelay.lab.ledger import Ledger


def test_the_ledger_counts_what_is_alive_at_a_time() -> None:
    x = torch.zeros(100)
    with Ledger() as ledger:
        first = x + 1  # 400 bytes
        del first
        second = x.clone()  # 400 again, after the first has gone
        second.add_(1)  # in place
        view = second.view(10, 10)
        third = view.double()  # 800 on top
        del second, view, third
    assert (ledger.peak, ledger.alive) == (1200, 0)
