"""Training one score model: presets, budget, steps, checkpoints, and the commands that do it."""
