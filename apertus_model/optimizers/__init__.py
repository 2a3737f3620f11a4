"""Optimizers: our own AdEMAMix and Sophia, torch's Muon for sharded matrices, and those of
`pytorch_optimizer`; `registry` lists all of them by name."""
