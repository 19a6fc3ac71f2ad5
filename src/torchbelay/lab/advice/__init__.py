"""Advice from a run, on networks: the regret of `torchbelay recommend --from-run` on the ring and on MNIST."""
