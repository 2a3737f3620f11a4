"""Losses are small: one thread keeps OpenMP out of the processes that later tests fork."""

import torch

torch.set_num_threads(1)
