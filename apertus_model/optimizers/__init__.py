"""Optimizers: our own AdEMAMix, torch's Muon for sharded matrices, and those of `benchmark`; `registry` lists
all of them by name."""
