"""Optimizers that are in use for comparison alone, in the recipes `optimizer-benchmark*`: those of
`pytorch_optimizer`, and Sophia. The trainer knows them by `apertus_model.optimizers.hook`."""
