"""What holds for every test."""

import torch

torch.set_num_threads(1)  # tensors are tiny here: threads of several test processes would only wait for each other
