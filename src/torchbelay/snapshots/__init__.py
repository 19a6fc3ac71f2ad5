"""After training: any average from a few snapshots of others, and weights that lie in files."""
