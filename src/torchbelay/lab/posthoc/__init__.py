"""Averages that are made after training: how good they are, by prediction, on white updates and on small networks."""
