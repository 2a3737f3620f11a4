"""Loss functions from tensors to tensors, which know nothing of a run, a layout or a data format.

Invariant: log-probabilities are computed in float32 whatever the precision of the model, and sums over tokens
in float64. No loss holds the logits of all tokens at once.
"""
