"""What holds for every test."""

import os

import torch

torch.set_num_threads(1)  # tensors are tiny here: threads of several test processes would only wait for each other
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are run by Triton's interpreter where there is no GPU for them
