"""Decides who may work at a part, writes what an attempt makes, and keeps or removes its checkpoints."""
