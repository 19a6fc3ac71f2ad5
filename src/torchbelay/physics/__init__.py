"""Numbers only: springs, couplings and the methods that make them. Nothing in here imports torch."""
