"""Optimizers: AdEMAMix and Sophia, which are ours, Muon of torch on shards, and those of
`pytorch_optimizer`; all of them by name in `registry`."""
