"""Score models of images as the paper trained them, NCSNv2 for MNIST and EDM for CIFAR-10, and their studies."""
