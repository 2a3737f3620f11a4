"""What the process of a measurement does: builds a contender, and takes steps when asked.

Invariant: each contender counts the tokens that it trained by itself, and computes with the same random rows.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed import fsdp
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.older_torch import OLDER_TORCH  # isort: skip  # before anything of torchtitan
from apertus_model.device import has_gpu  # isort: skip  # as above
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec as TitanModelSpec
from torchtitan.trainer import Trainer

from apertus_model.model.hf import to_hugging_face
from apertus_model.model.model import model_config, shapes
from apertus_model.trainer.config import NoTokenizer, debug_config, parallelism_config, trainer_config
from apertus_model.trainer.lifecycle import Lifecycle
from apertus_model.trainer.loader import collate
from apertus_model.trainer.process import engine_process
from benchmarks.engine import Data, NoStorage, RandomSamples, Unrecorded
from benchmarks.gpu.profile import STEPS, seconds_by_class
from benchmarks.gpu.shapes import SEED, Shape, Task
from specs.hugging_face import hugging_face_config
from specs.launch import Parallel
from specs.model import ModelSpec

WARM_UP = 3  # steps, in the first of which layers are compiled
PROFILED = 2  # steps
FUSED_ATTENTION = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION


class Running(NamedTuple):
    """A contender that has been built."""

    step: Callable[[], None]
    tokens: Callable[[], int]  # trained so far
    first_loss: Callable[[], float | None]


class Rows(Unrecorded):
    """Keeps what our trainer reports of the first step and of the last one."""

    first: dict[str, float] | None = None
    tokens = 0

    def add_step(self, row: Any) -> None:
        self.first = self.first or row
        self.tokens = row["tokens"]


def ours(task: Task, scratch: str) -> Running:
    """Our trainer, as a training stage runs it."""
    rows = Rows()
    lifecycle = Lifecycle(
        begin_step=0, source=None, storage=NoStorage(), stop_requested=lambda: False, scratch=scratch
    )
    data = Data(task.model.vocab_size, task.shape.length)
    trainer = trainer_config(task.segment, data, rows, lifecycle, world_size=1).build()
    return Running(
        steps_of(trainer, trainer.begin()),
        lambda: rows.tokens,
        lambda: rows.first and rows.first["loss"],
    )


def steps_of(trainer: Trainer, batches: Iterator[Any]) -> Callable[[], None]:
    """A step of a trainer."""

    def step() -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)

    return step


def device() -> torch.device:
    return torch.device("cuda" if has_gpu() else "cpu")


def autocast(shape: Shape, *, enabled: bool = True) -> torch.autocast:
    return torch.autocast(device().type, torch.bfloat16, enabled=enabled and shape.precision == "bfloat16")


class RandomLoader(BaseDataLoader):
    """The rows for torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        shape: Shape

    def __init__(self, config: Config, **unused: Any) -> None:
        self._shape = config.shape

    def __iter__(self) -> Iterator[Any]:
        return batches(self._shape)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def batches(shape: Shape) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Endless micro-batches, on the host."""
    samples, row = RandomSamples(shape.model.vocab_size, shape.length), 0
    while True:
        yield collate([samples[row + number] for number in range(shape.micro_batch)])
        row += shape.micro_batch


def llama(model: ModelSpec, length: int) -> llama3.Llama3Model.Config:
    """torchtitan's Llama with the dimensions of a model, its own initial weights, and its own attention
    where that can compute gradients."""
    rope = ComplexRoPE.Config(dim=model.head_dim, max_seq_len=length, theta=model.rope_theta, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=model.n_layers, dim=model.dim, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
        hidden_dim=model.ffn_dim, rope=rope, attn_backend="flex",
    )  # fmt: skip
    for layer in layers if not has_gpu() else ():
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size, embedding_dim=model.dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=model.dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=model.dim,
            out_features=model.vocab_size,
            param_init=llama3._output_linear_init(model.dim),
        ),
        layers=layers,
    )


def torchtitan(task: Task, scratch: str) -> Running:
    """torchtitan's own trainer, with the settings of its own recipes where the task has none."""
    shape, contender, model = task.shape, task.contender, task.model
    if OLDER_TORCH:
        llama3.parallelize.apply_fsdp_to_decoder = lambda *model, **settings: None
    trainer = Trainer.Config(
        model_spec=TitanModelSpec(
            name="llama3",
            flavor=shape.name,
            model=llama(model, shape.length),
            parallelize_fn=llama3.parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        dump_folder=scratch,
        tokenizer=NoTokenizer(),
        dataloader=RandomLoader.Config(shape=shape),
        optimizer=default_adamw(lr=1e-4),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)),
        training=TrainingConfig(
            local_batch_size=shape.micro_batch,
            global_batch_size=shape.batch,
            seq_len=shape.length,
            max_norm=1.0,
            steps=1_000_000,
            mixed_precision_param="float32" if OLDER_TORCH else shape.precision,
            disable_cuda_graphs=not contender.graphs,
        ),
        parallelism=parallelism_config(Parallel()),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        compile=CompileConfig(enable=contender.compiled),
        debug=debug_config(SEED, deterministic=False),
    ).build()
    for module in trainer.model_parts[0].modules() if not has_gpu() else ():
        if isinstance(module, fsdp.FSDPModule):  # gloo has no pre-multiplied sum
            module.set_force_sum_reduction_for_comms(True)
    logged_losses, log = list[float](), trainer.metrics_processor.log

    def logged(step: int, loss: float, *further: Any, **metrics: Any) -> None:
        logged_losses.append(loss)
        log(step, loss, *further, **metrics)

    trainer.metrics_processor.log = logged
    rows = trainer.batch_generator(trainer.dataloader)
    train = steps_of(trainer, rows)

    def step() -> None:
        with autocast(shape, enabled=OLDER_TORCH):
            train()

    return Running(step, lambda: trainer.ntokens_seen, lambda: next(iter(logged_losses), None))


def transformers(task: Task, scratch: str) -> Running:
    """What a script does around `ApertusForCausalLM`, with the weights that our trainer begins with."""
    from transformers import ApertusConfig, ApertusForCausalLM

    shape, spec = task.shape, task.model
    fields = hugging_face_config(spec, max_position_embeddings=shape.length, bos_token_id=0, eos_token_id=1)
    with device():
        model = ApertusForCausalLM(ApertusConfig(**fields, attn_implementation="sdpa", use_cache=False))
        own = model_config(spec, sequence_length=shape.length, attention="sdpa", seed=SEED).build()
    own.init_weights()
    model.load_state_dict(to_hugging_face(own.state_dict()))
    del own
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    rows, of_steps, tokens = batches(shape), list[float](), 0

    def step() -> None:
        nonlocal tokens
        optimizer.zero_grad()
        total = torch.zeros((), device=device())
        for _ in range(shape.batch // shape.micro_batch):
            inputs, labels = next(rows)
            with autocast(shape):
                logits = model(input_ids=inputs["input"].to(device())).logits
            summed = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten().to(device()), reduction="sum"
            )
            loss = summed / shape.tokens
            loss.backward()
            total += loss.detach()
            tokens += labels.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        of_steps.append(total.item())

    return Running(step, lambda: tokens, lambda: next(iter(of_steps), None))


def limit(task: Task, scratch: str) -> Running:
    """The matrix products and the attention of a step, forward and backward, and nothing else."""
    shape, model = task.shape, task.model
    rows, tokens = shape.micro_batch * shape.length, 0

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device(), dtype=getattr(torch, shape.precision))

    matrices = [
        random(*size) / size[1] ** 0.5
        for name, size in shapes(model).items()
        if len(size) == 2 and not name.startswith("tok_embeddings")
    ]
    states = {width: random(rows, width) for matrix in matrices for width in matrix.shape}
    results = {width: torch.empty_like(state) for width, state in states.items()}
    gradients = {matrix.shape: torch.empty_like(matrix) for matrix in matrices}
    query = random(shape.micro_batch, model.n_heads, shape.length, model.head_dim).requires_grad_()
    key, value = (
        random(shape.micro_batch, model.n_kv_heads, shape.length, model.head_dim).requires_grad_()
        for _ in range(2)
    )
    upstream = random(*query.shape)

    def attention() -> None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.grad(mixed, (query, key, value), upstream)

    def products() -> None:
        for matrix in matrices:
            outputs, inputs = matrix.shape
            torch.mm(states[inputs], matrix.T, out=results[outputs])
            torch.mm(states[outputs], matrix, out=results[inputs])
            torch.mm(states[outputs].T, states[inputs], out=gradients[matrix.shape])

    def work() -> None:
        for _ in range(model.n_layers):
            attention()
        products()

    if has_gpu():
        fastest = min(FUSED_ATTENTION, key=lambda backend: seconds_with(backend, attention))
        plain, work = work, lambda: run_with(fastest, plain)
        work = captured(work)

    def step() -> None:
        nonlocal tokens
        for _ in range(shape.batch // shape.micro_batch):
            work()
        tokens += shape.tokens

    return Running(step, lambda: tokens, lambda: None)


def run_with(backend: SDPBackend, work: Callable[[], None]) -> None:
    with sdpa_kernel(backend):
        work()


def seconds_with(backend: SDPBackend, attention: Callable[[], None]) -> float:
    """Seconds of ten calls on the GPU; infinite where the backend does not run."""
    try:
        run_with(backend, attention)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            run_with(backend, attention)
        torch.cuda.synchronize()
    except RuntimeError:
        return float("inf")
    return time.perf_counter() - begin


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph, so that small kernels do not wait for the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


KINDS: dict[str, Callable[[Task, str], Running]] = {
    "limit": limit, "ours": ours, "torchtitan": torchtitan, "transformers": transformers
}  # fmt: skip


def synchronise() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def serve(task: Task, threads: int, connection: Connection) -> None:
    """The process of a contender: answers with fields of its row when it is warm, and then each request:
    a number of steps with (tokens, seconds), "profile" with seconds a step by class."""
    with tempfile.TemporaryDirectory() as scratch, engine_process(threads=threads):
        running = KINDS[task.contender.kind](task, scratch)
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            running.step()
        synchronise()
        peak = torch.cuda.max_memory_allocated() if has_gpu() else None
        connection.send({"first_loss": running.first_loss(), "peak_memory": peak})
        while request := connection.recv():
            connection.send(profiled(running) if request == "profile" else timed(running, request))


def timed(running: Running, steps: int) -> tuple[int, float]:
    """Tokens and seconds of a round."""
    gc.collect()
    synchronise()
    tokens, begin = running.tokens(), time.perf_counter()
    for _ in range(steps):
        running.step()
    synchronise()
    return running.tokens() - tokens, time.perf_counter() - begin


def profiled(running: Running) -> dict[str, float]:
    """Seconds of a step, by class."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * has_gpu()
    running.step()
    synchronise()
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function(STEPS):
        for _ in range(PROFILED):
            running.step()
        synchronise()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return seconds_by_class(file.name, PROFILED)


def facts(connection: Connection) -> None:
    """Answers (name, bytes of memory, compute capability, `OLDER_TORCH`) of the GPU; None without one."""
    answer = None
    if has_gpu():
        gpu = torch.cuda.get_device_properties(0)
        answer = gpu.name, gpu.total_memory, (gpu.major, gpu.minor), OLDER_TORCH
    connection.send(answer)
