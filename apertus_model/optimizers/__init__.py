"""Optimizers: AdEMAMix, which is ours, Muon of torch on shards, and those of `pytorch_optimizer`."""
