"""Springs, couplings and methods as plain numbers. Nothing in this folder imports torch or numpy."""
