"""The layouts of checkpoints, one file per layout: how its tensors are read, and how a file like it is written."""
