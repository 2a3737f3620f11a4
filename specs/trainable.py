"""The parameters that a stage trains: patterns of names, and the names and sizes of a model's parameters.

A pattern is a shell pattern: `layers.[2-5].*`, `*.attention.*`, `lm_head.weight`. Parameters that fit no
pattern keep their bits; they have no gradients and no optimizer states.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from specs.errors import FieldPath, Problem, did_you_mean
from specs.model import ModelSpec

MATRICES = (".wq.", ".wk.", ".wv.", ".wo.", "_proj.")
"""Parts of the names of matrices in layers."""
QK_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")


def sizes(model: ModelSpec) -> dict[str, int]:
    """The number of elements of every parameter of a model without adapters, by its name in the engine, in
    the order of the forward pass."""
    dim, queries, keys, ffn = model.dim, model.query_dim, model.key_dim, model.ffn_dim
    feed_forward = {"up_proj.weight": dim * ffn, "act.alpha_p": 1, "act.alpha_n": 1}
    if model.activation == "swiglu":
        feed_forward = {"gate_proj.weight": dim * ffn, "up_proj.weight": dim * ffn}
    layer = {
        "attention_norm.weight": dim,
        "attention.qkv_linear.wq.weight": dim * queries,
        "attention.qkv_linear.wk.weight": dim * keys,
        "attention.qkv_linear.wv.weight": dim * keys,
        **(dict.fromkeys(QK_NORMS, model.head_dim) if model.qk_norm else {}),
        "attention.wo.weight": queries * dim,
        "ffn_norm.weight": dim,
        **{f"feed_forward.{name}": size for name, size in feed_forward.items()},
        "feed_forward.down_proj.weight": ffn * dim,
    }
    mixer = {}
    if model.mamba is not None:
        sizes_of_own = {
            "conv_c": queries * model.mamba.conv_width,
            **dict.fromkeys(("conv_b", "conv_x"), keys * model.mamba.conv_width),
            **dict.fromkeys(("a_log", "dt_bias", "d"), model.n_heads),
            "out_norm": queries,
            "z_proj.weight": dim * queries,
            "dt_proj.weight": dim * model.n_heads,
        }
        mixer = {f"attention.{name}": sizes_of_own[name] for name in model.mamba.own}
    head = "lm_head.score" if model.head == "reward" else "lm_head.weight"
    return {
        "tok_embeddings.weight": model.vocab_size * dim,
        **{
            f"layers.{index}.{name}": size
            for index in range(model.n_layers)
            for name, size in (layer | mixer if index in model.mamba_layers else layer).items()
        },
        **{
            f"schedule.sums.{number}.weight": len(step.summed)
            for number, step in enumerate(model.schedule, 1)
            if step.summed
        },
        **({"schedule.norm.weight": dim} if model.schedule_vectors else {}),
        "norm.weight": dim,
        head: model.outputs * dim,
    }


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is trained; without patterns, all are."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def trained(model: ModelSpec, patterns: Sequence[str]) -> dict[str, int]:
    return {name: size for name, size in sizes(model).items() if fits(name, patterns)}


def problems(path: FieldPath, model: ModelSpec, patterns: Sequence[str]) -> list[Problem]:
    """The problems of patterns that fit no parameter of the model."""
    names = list(sizes(model))
    return [
        Problem(
            (*path, index),
            f"no parameter of this model is called '{pattern}'",
            did_you_mean(pattern, names) or "use names such as layers.[2-5].* or lm_head.weight.",
        )
        for index, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def untouched(model: ModelSpec, patterns: Sequence[str]) -> int:
    """The number of layers that a backward pass does not reach: those that run before the first layer that is
    trained or reads what is trained."""
    if fits("tok_embeddings.weight", patterns):
        return 0
    names = trained(model, patterns)
    count = 0
    for number, step in enumerate(model.schedule, 1):
        own = tuple(f"layers.{layer}." for layer in step.layers)
        own += (f"schedule.sums.{number}.", *["schedule.norm."] * step.normed)
        if any(name.startswith(own) for name in names):
            break
        count += len(step.layers)
    return count
