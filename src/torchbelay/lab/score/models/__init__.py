"""Score models: networks, their losses and their samplers (NCSNv2 and EDM). Nothing here trains."""
