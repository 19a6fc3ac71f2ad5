"""A score model of eight Gaussians whose exact denoiser is known: small networks, many seeds. No images."""
