"""Training speed on one GPU, beside other trainers and the limit of the card: `python -m benchmarks.gpu`."""
