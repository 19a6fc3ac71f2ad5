"""Score models (NCSNv2 and EDM): networks, their losses and their samplers. Nothing here trains."""
