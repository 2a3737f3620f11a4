"""The Apertus decoder as a torchtitan model, built from a `ModelSpec`.

    x = x + wo(attention(rope(norm(wq x)), rope(norm(wk x)), wv x))    grouped queries, QK-norm before RoPE
    x = x + down_proj(xielu(up_proj x)), or SwiGLU                      both on pre-normed x, without biases

Embeddings are not tied.

Invariant: the config is complete without a run: dimensions come from the spec, layout and length from the
trainer's config, and initial weights only from `seed`. Source: Apertus report (arXiv 2509.14233), section
2.1.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import AttentionMasksType, GQAttention, QKVLinear, VarlenAttention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.protocols.module import Module

from apertus_model.model.attention import (
    EarlierKeysAttention,
    KeysValues,
    SdpaAttention,
    begun_rows,
    document_mask,
    document_numbers,
    document_offsets,
    inner_attention,
)
from apertus_model.model.feed_forward import XIELU, ApertusFeedForward
from apertus_model.model.init import initialise_parameters
from apertus_model.model.layer_schedule import Branch, LayerSchedule, layer_schedule_config
from apertus_model.model.lora import add_adapters
from apertus_model.model.mamba import mixing
from apertus_model.model.on_host import OnHost, copy_to, host_tensor
from apertus_model.model.output import LossFunction, OutputLayer, RewardHead
from apertus_model.model.pass_weights import PassWeights
from apertus_model.model.rotation import Llama3RoPE, rope_config
from apertus_model.model.sharding import set_sharding
from apertus_model.model.sparse_attention import COMPUTED_BY, choosing
from specs.model import ModelSpec
from specs.settings import Lora
from specs.trainable import fits


class ApertusBlock(TransformerBlock):
    """One layer: attention and feed-forward, each on normed input, each added to the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.feed_forward is not None
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.feed_forward = config.feed_forward.build()

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: AttentionMasksType | torch.Tensor | None,
        positions: torch.Tensor | None = None,
        branch: Branch | None = None,
        earlier: Sequence[KeysValues] | None = None,
        mixer: Callable[..., Any] | None = None,
    ) -> Any:
        """(batch, seq_len, dim) -> (batch, seq_len, dim); masks as made by
        `ApertusModel.get_attention_masks`. With `branch`, returns what that branch alone would add to x. With
        `earlier`, the keys and values that `EarlierKeysAttention` sees as well, also returns the layer's own
        keys and values. With `mixer`, returns `mixer(attention, its input, positions)`."""
        if mixer is not None:
            return mixer(self.attention, self.attention_norm(x), positions)
        if branch == "feed_forward":
            return self.feed_forward(self.ffn_norm(x))
        normed = self.attention_norm(x)
        if earlier is not None:
            attended, own = self.attention(normed, attention_masks, positions, earlier=earlier)
            x = x + attended
            return x + self.feed_forward(self.ffn_norm(x)), own
        attended = self.attention(normed, attention_masks, positions)
        if branch == "attention":
            return attended
        x = x + attended
        return x + self.feed_forward(self.ffn_norm(x))


class ApertusModel(Decoder):
    """Decoder from tokens to logits, or to a loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        seed: int  # of the initial weights
        init_std: float  # standard deviation of the initial weights
        lora: Lora | None = None  # adapters; None: no adapters, and `trainable` are trained
        trainable: Sequence[str] = ()  # patterns of the parameters that are trained; if empty, all are
        schedule: LayerSchedule.Config | None = None  # of the layers; None: the plain stack

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Takes sequence length and layout from a trainer config, before torchtitan builds the model."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            set_sharding(self, sequence_parallel=config.parallelism.enable_sequence_parallel)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Number of parameters, and training FLOPs per token."""
            attention = self.layers[0].attention
            return get_dense_model_nparams_and_flops(
                model,
                n_layers=len(self.layers),
                n_heads=attention.n_heads,
                head_dims=2 * attention.head_dim,
                seq_len=seq_len,
            )

    config: Config
    # set by `parallelize` if ranks share a sequence
    cp_mesh: DeviceMesh | None = None
    cp_load_balancer: str | None = None  # torchtitan's name
    pass_weights: PassWeights | None = None  # set by `parallelize` if this process alone rounds the weights

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.schedule = None if config.schedule is None else config.schedule.build()
        if config.lora is not None:
            add_adapters(self, config.lora)
        elif config.trainable:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(fits(name, config.trainable))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | OnHost | None = None,
        attention_masks: AttentionMasksType | torch.Tensor | None = None,
        labels: torch.Tensor | OnHost | None = None,
        loss_fn: LossFunction | None = None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Logits of the next token, (batch, seq_len, vocab_size), float32 unless mixed precision says
        otherwise, or a loss that is computed without them (see `output`). In a pipeline, a stage that is not
        the last returns hidden states.

        Args:
            tokens: (batch, seq_len) int64.
            positions: (batch, seq_len) int64, 0 at the first token of each document; one document per row by
                default. If they are on the host, no backend waits for the device to find the borders of
                documents.
            attention_masks: as made by `get_attention_masks`, which is called when they are not given.
            labels: (batch, seq_len) int64, passed to `loss_fn` on the device that they are on.
            loss_fn: computes the loss in the output layer.
            run: called after the embedding in place of the rest of the forward pass, with the layers by name,
                the embedded tokens, masks and positions; its result is returned.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if attention_masks is None:
            attention_masks = self.get_attention_masks(positions)
        positions = copy_to(positions, tokens.device)
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if run is not None:
            return run(self.layers, hidden, attention_masks, positions)
        if self.schedule is not None:
            hidden = self.schedule(self.layers, hidden, attention_masks, positions)
        else:
            for layer in self.layers.values():
                hidden = layer(hidden, attention_masks, positions)
        if self.lm_head is None:  # not the last stage of a pipeline
            return hidden
        return self.lm_head(self.norm(hidden), None if labels is None else host_tensor(labels), loss_fn)

    def in_passes(self) -> AbstractContextManager[None]:
        """The context of forward and backward passes, in which the model may have other parameters than those
        that are trained: see `PassWeights.in_use`."""
        return nullcontext() if self.pass_weights is None else self.pass_weights.in_use()

    def get_attention_masks(self, positions: torch.Tensor | OnHost) -> Any:
        """The document mask for the attention backend, on the device of the weights; all layers share it."""
        device = next(self.parameters()).device
        backend = self.config.first_attention.inner_attention  # every layer has attention
        if type(backend) in COMPUTED_BY.values():
            return document_numbers(copy_to(positions, device))
        if isinstance(backend, SdpaAttention.Config):
            return document_mask(copy_to(positions, device), self.cp_mesh, self.cp_load_balancer)
        if isinstance(backend, VarlenAttention.Config):
            return document_offsets(host_tensor(positions), device)
        return super().get_attention_masks(begun_rows(copy_to(positions, device)))

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fills buffers (torchtitan) and parameters (ours, independent of the layout). All layers share one
        table of positions: at 65,536 positions and heads of 128, a table takes 67 MB."""
        super().init_states(buffer_device=buffer_device)
        ropes = [module for module in self.modules() if isinstance(module, Llama3RoPE)]
        for rope in ropes[1:]:
            rope.cache = ropes[0].cache
        initialise_parameters(
            self, seed=self.config.seed, std=self.config.init_std, n_layers=len(self.config.layers)
        )


def model_config(
    spec: ModelSpec,
    *,
    sequence_length: int,
    attention: str,
    seed: int = 0,
    lora: Lora | None = None,
    trainable: Sequence[str] = (),
    linear_config: Callable[..., Linear.Config] = Linear.Config,
) -> ApertusModel.Config:
    """The torchtitan config of a model.

    Args:
        spec: dimensions.
        sequence_length: longest sequence, in tokens.
        attention: an attention backend that can run here (`attention_choice.resolve_backend`).
        seed: of the initial weights.
        lora: adapters; with them, nothing else is trained except the head of a reward model.
        trainable: patterns of the parameters that are trained (`specs.trainable`); if empty, all are. Without
            effect if there are adapters.
        linear_config: makes the configs of the layers' linear modules (`float8.linear_config`).
    """
    no_init = {"weight": skip_param_init}

    def linear(inputs: int, outputs: int) -> Linear.Config:
        return linear_config(in_features=inputs, out_features=outputs, param_init=no_init)

    def norm(width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=spec.norm_eps, param_init=no_init)

    attention_class = EarlierKeysAttention if spec.reads_earlier_keys else GQAttention
    layer = ApertusBlock.Config(
        attention_norm=norm(spec.dim),
        attention=attention_class.Config(
            dim=spec.dim,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            qkv_linear=QKVLinear.Config(
                head_dim=spec.head_dim,
                wq=linear(spec.dim, spec.query_dim),
                wkv=linear(spec.dim, spec.key_dim),
            ),
            qk_norm=norm(spec.head_dim) if spec.qk_norm else None,
            rope=rope_config(spec, sequence_length),
            inner_attention=inner_attention(attention),
            wo=linear(spec.query_dim, spec.dim),
        ),
        ffn_norm=norm(spec.dim),
        feed_forward=_feed_forward(spec, linear),  # torchtitan accepts any Module here
    )
    layers = [copy.deepcopy(layer) for _ in range(spec.n_layers)]  # torchtitan may edit each
    for index, config in enumerate(layers):
        config.attention = token_mixer(config.attention, spec, index)
    head: Module.Config  # torchtitan accepts any Module here, too
    if spec.head == "reward":
        head = RewardHead.Config(in_features=spec.dim, param_init={"score": skip_param_init})
    else:
        head = OutputLayer.Config(in_features=spec.dim, out_features=spec.vocab_size, param_init=no_init)
    return ApertusModel.Config(
        dim=spec.dim,
        vocab_size=spec.vocab_size,
        seed=seed,
        init_std=spec.init_std,
        lora=lora,
        trainable=trainable,
        schedule=None if spec.plain_stack else layer_schedule_config(spec.schedule, norm(spec.dim)),
        tok_embeddings=Embedding.Config(
            num_embeddings=spec.vocab_size, embedding_dim=spec.dim, param_init=no_init
        ),
        layers=layers,
        norm=norm(spec.dim),
        lm_head=head,
    )


def _feed_forward(spec: ModelSpec, linear: Callable[[int, int], Linear.Config]) -> Module.Config:
    up_proj, down_proj = linear(spec.dim, spec.ffn_dim), linear(spec.ffn_dim, spec.dim)
    if spec.activation == "swiglu":
        gate_proj = linear(spec.dim, spec.ffn_dim)
        return ApertusFeedForward.Config(gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)
    act = XIELU.Config(param_init={"alpha_p": skip_param_init, "alpha_n": skip_param_init})
    return ApertusFeedForward.Config(up_proj=up_proj, act=act, down_proj=down_proj)


def token_mixer(plain: GQAttention.Config, spec: ModelSpec, layer: int) -> GQAttention.Config:
    """The config of what mixes the tokens of the layer with this number: attention (`plain`), or what a field
    of the spec puts in its place, with the modules of `plain`."""
    if spec.attention is not None:
        return choosing(plain, spec.attention, layer)
    if spec.mamba is not None and layer in spec.mamba_layers:
        return mixing(plain, spec.mamba)
    return plain


def empty_model(spec: ModelSpec, sequence_length: int = 1) -> ApertusModel:
    """A model on the meta device, with attention that runs anywhere: for names, shapes and code."""
    with torch.device("meta"):
        model: ApertusModel = model_config(spec, sequence_length=sequence_length, attention="sdpa").build()
    return model


def shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """Shape of every weight of a model, by our names, in the order of its layers."""
    return {name: tensor.shape for name, tensor in empty_model(spec).state_dict().items()}
