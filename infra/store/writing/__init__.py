"""One attempt at one part: who may work at it, what it writes, and which of its checkpoints stay."""
