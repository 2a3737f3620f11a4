"""Rehearses a training step of one rank of any layout, without GPUs, peers or memory.

The step is the project's own: `trainer_config`, `ApertusTrainer`, its layout, pipeline schedule, loss,
clipping and optimizer. Tensors on the GPU are torch's FakeTensors, which have a shape and no values; the
process group is torch's fake one, whose collectives do nothing. Tensors on the CPU are real, so that meshes,
batches and counters have their values.

Invariant: only `flows` knows this folder: it starts `server` as a process, and reads `records`, `rates` and
`fake_cuda`, which load neither torch nor numpy.
"""
