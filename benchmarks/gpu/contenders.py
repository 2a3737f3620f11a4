"""What the process of a measurement does: builds a contender, and takes steps when asked.

Invariant: all train on the same random rows, which our loader reads ahead. Each counts the tokens that it
trained by itself.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from apertus_model.model.older_torch import OLDER_TORCH  # isort: skip  # before anything of torchtitan
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec as TitanModelSpec
from torchtitan.trainer import Trainer

from apertus_model.device import has_gpu
from apertus_model.model.hf import to_hugging_face
from apertus_model.model.model import model_config, shapes
from apertus_model.trainer.config import trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.process import prepare_process
from apertus_model.trainer.trainer import ApertusTrainer
from benchmarks.engine import Data, NoStorage, Unrecorded
from benchmarks.gpu.profile import STEPS, seconds_by_class
from benchmarks.gpu.shapes import SEED, Shape, Trial
from specs.hugging_face import hugging_face_config
from specs.model import ModelSpec

WITH_FSDP = has_gpu() and not OLDER_TORCH  # it casts the weights of torchtitan's trainer; else autocast does
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # attention of the limit, the best first
WARM_UP = 3  # steps, in the first of which layers are compiled
PROFILED = 2  # steps
Step = Callable[[], int]  # takes a step, and returns the tokens that it trained
Built = tuple[Step, list[float]]  # a step, and the losses that are reported meanwhile


def device() -> torch.device:
    return torch.device("cuda" if has_gpu() else "cpu")


def synchronise() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def autocast(shape: Shape, *, enabled: bool = True, cache: bool = True) -> torch.autocast:
    enabled &= shape.precision == "bfloat16"
    return torch.autocast(device().type, torch.bfloat16, enabled=enabled, cache_enabled=cache)


class History(Unrecorded):
    """Keeps what our trainer reports."""

    def __init__(self) -> None:
        self.losses, self.tokens = list[float](), 0

    def add_step(self, row: Any) -> None:
        self.losses.append(row["loss"])
        self.tokens = row["tokens"]


def own_config(trial: Trial, scratch: str, history: History) -> ApertusTrainer.Config:
    """The configuration of our trainer, as a training stage makes it."""
    lifecycle = Lifecycle(
        begin_step=0, source=None, storage=NoStorage(), stop_requested=lambda: False, scratch=scratch
    )
    data = Data(trial.model.vocab_size, trial.shape.length)
    return trainer_config(trial.segment, data, history, lifecycle, world_size=1)


def ours(trial: Trial, scratch: str) -> Built:
    """Our trainer."""
    history = History()
    trainer = own_config(trial, scratch, history).build()
    return step_of(trainer, trainer.begin(), lambda: history.tokens), history.losses


def step_of(trainer: Trainer, batches: Iterator[Any], trained: Callable[[], int]) -> Step:
    """A step of a trainer. `trained`: its tokens so far."""

    def step() -> int:
        before = trained()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        return trained() - before

    return step


def llama(shape: Shape, model: ModelSpec) -> TitanModelSpec:
    """torchtitan's Llama 8B with the dimensions of a model, and its own attention where that can compute
    gradients."""
    known, dim, words = llama3.model_registry("8B"), model.dim, model.vocab_size
    rope = ComplexRoPE.Config(
        dim=model.head_dim, max_seq_len=shape.length, theta=model.rope_theta, scaling="llama"
    )
    layers = llama3._build_llama3_layers(
        n_layers=model.n_layers, dim=dim, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
        hidden_dim=model.ffn_dim, rope=rope, attn_backend="flex",
    )  # fmt: skip
    for layer in layers if not has_gpu() else ():
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = replace(
        known.model,
        dim=dim,
        vocab_size=words,
        tok_embeddings=replace(known.model.tok_embeddings, num_embeddings=words, embedding_dim=dim),
        norm=replace(known.model.norm, normalized_shape=dim),
        lm_head=replace(known.model.lm_head, in_features=dim, out_features=words),
        layers=layers,
    )
    return replace(known, flavor=shape.name, model=config, state_dict_adapter=None)


def torchtitan(trial: Trial, scratch: str) -> Built:
    """torchtitan's own trainer, with our settings, and those of its own recipes where we have none."""
    shape, model, own = trial.shape, trial.model, own_config(trial, scratch, History())
    if not WITH_FSDP:
        llama3.parallelize.apply_fsdp_to_decoder = lambda *model, **settings: None
    trainer = Trainer.Config(
        model_spec=llama(shape, model),
        dump_folder=scratch,
        tokenizer=own.tokenizer,
        dataloader=own.dataloader,
        optimizer=default_adamw(lr=1e-4),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)),
        training=replace(own.training, disable_cuda_graphs=not trial.graphs),
        parallelism=own.parallelism,
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=own.compile,
        debug=own.debug,
    ).build()
    losses = list[float]()
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    train = step_of(trainer, trainer.batch_generator(trainer.dataloader), lambda: trainer.ntokens_seen)

    def step() -> int:
        # a graph must not read weights that were cast for an earlier micro-batch
        with autocast(shape, enabled=not WITH_FSDP, cache=not trial.graphs):
            return train()

    return step, losses


def transformers(trial: Trial, scratch: str) -> Built:
    """What a script does around `ApertusForCausalLM`, with the weights that our trainer begins with."""
    from transformers import ApertusConfig, ApertusForCausalLM

    shape, spec = trial.shape, trial.model
    fields = hugging_face_config(spec, max_position_embeddings=shape.length, bos_token_id=0, eos_token_id=1)
    with device():
        model = ApertusForCausalLM(ApertusConfig(**fields, attn_implementation="sdpa", use_cache=False))
        own = model_config(spec, sequence_length=shape.length, attention="sdpa", seed=SEED).build()
    own.init_weights()
    model.load_state_dict(to_hugging_face(own.state_dict()))
    del own
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows = own_config(trial, scratch, History()).dataloader
    batches = iter(rows.build(dp_world_size=1, dp_rank=0, local_batch_size=shape.micro_batch))
    losses = list[float]()

    def step() -> int:
        optimizer.zero_grad()
        total, tokens = torch.zeros((), device=device()), 0
        for _ in range(shape.batch // shape.micro_batch):
            inputs, labels = next(batches)
            tokens += labels.numel()
            with autocast(shape):
                logits = model(input_ids=inputs["input"].to(device())).logits
            summed = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten().to(device()), reduction="sum"
            )
            loss = summed / shape.tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        losses.append(total.item())
        return tokens

    return step, losses


def limit(trial: Trial, scratch: str) -> Built:
    """The matrix products and the attention of a step, forward and backward, and nothing else."""
    shape, model = trial.shape, trial.model

    def random(*size: int) -> torch.Tensor:
        numbers = torch.randn(size, device=device(), dtype=getattr(torch, shape.precision))
        return numbers.div_(size[-1] ** 0.5).requires_grad_()

    named = {name: size for name, size in shapes(model).items() if not name.startswith("tok_embeddings")}
    matrices = [random(*size) for size in named.values() if len(size) == 2]
    tokens = shape.micro_batch * shape.length
    states = {width: random(tokens, width) for matrix in matrices for width in matrix.shape}
    heads = model.n_heads, model.n_kv_heads, model.n_kv_heads
    qkv = [random(shape.micro_batch, number, shape.length, model.head_dim) for number in heads]

    def micro_batch() -> None:
        for _ in range(model.n_layers):
            mixed = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
            torch.autograd.grad(mixed, qkv, qkv[0])
        for matrix in matrices:
            inputs, gradients = states[matrix.shape[1]], states[matrix.shape[0]]
            torch.autograd.grad(F.linear(inputs, matrix), (inputs, matrix), gradients)

    run = captured(micro_batch) if has_gpu() else micro_batch

    def step() -> int:
        for _ in range(shape.batch // shape.micro_batch):
            run()
        return shape.tokens

    return step, []


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Work as a CUDA graph, so that small kernels do not wait for the host."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    synchronise()
    with sdpa_kernel(FASTEST, set_priority=True):
        with torch.cuda.stream(stream):
            work()
        synchronise()
        with torch.cuda.graph(graph, stream=stream):
            work()
    return graph.replay


def serve(trial: Trial, threads: int, folder: str, connection: Connection) -> None:
    """The process of a contender. The answer to `build` is (first loss, peak of memory in bytes), or None for
    what it has not; to `round` (tokens, seconds); to `profile` seconds a step by class."""
    connection.recv()
    prepare_process(threads)
    scratch = tempfile.mkdtemp(dir=folder)
    builders = {"limit": limit, "ours": ours, "torchtitan": torchtitan, "transformers": transformers}
    step, losses = builders[trial.kind](trial, scratch)
    for _ in range(WARM_UP):
        step()
    synchronise()
    peak = torch.cuda.max_memory_allocated() if has_gpu() else None
    connection.send((next(iter(losses), None), peak))
    while True:
        profile = connection.recv() == "profile"
        connection.send(profiled(step, scratch) if profile else timed(step, trial.shape.steps))


def timed(step: Step, steps: int) -> tuple[int, float]:
    """Tokens and seconds of a round."""
    gc.collect()
    synchronise()
    begin = time.perf_counter()
    tokens = sum(step() for _ in range(steps))
    synchronise()
    return tokens, time.perf_counter() - begin


def profiled(step: Step, scratch: str) -> dict[str, float]:
    """Seconds of a step, by class."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * has_gpu()
    step()
    synchronise()
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function(STEPS):
        for _ in range(PROFILED):
            step()
        synchronise()
    profiler.export_chrome_trace(f"{scratch}/trace.json")
    return seconds_by_class(f"{scratch}/trace.json", PROFILED)
