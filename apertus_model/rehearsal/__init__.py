"""Rehearses a training step of one rank of any layout, without GPUs, peers or memory.

The step is the project's own: `trainer_config`, `ApertusTrainer`, its layout, pipeline schedule, loss,
clipping and optimizer. Tensors on the GPU are torch's FakeTensors, which have a shape and no values; the
process group is torch's fake one, whose collectives do nothing. Tensors on the CPU are real, so that meshes,
batches and counters have their values.

    __main__      the process of one rank: a task as JSON in, a report as JSON out
    server        forks these processes
    records       both documents
    fake_cuda     a CUDA without a GPU, for a CPU build of torch; loaded before torch
    patches       every name of torch and Triton that is replaced, in one table
    step          builds the trainer, runs the step, and has samples of the shape that the training reads
    observer      sees every operator, runs it without values, and notes what the host waits for
    allocations   memory at the peak, from the tensors that live
    costs         what is computed and moved, and what a compiler would fuse
    exchanges     what is sent, and what products hide of it
    rates         data sheets and efficiencies, for the predicted time

Invariant: only `flows` knows this folder: it starts `server` as a process, and reads `records`, `rates` and
`fake_cuda`, which load neither torch nor numpy.
"""
