"""The model card of an exported model, made from its lineage in the store.

Invariant: every number on the card was read from a spec or a manifest; nothing is claimed that was not
recorded. Text that comes from a recipe cannot break out of its cell.
"""

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from infra.store import Store
from infra.store.reading.lineage import Ancestor, lineage, of_weights
from specs.hugging_face import LEAST_TRANSFORMERS, own_class
from specs.job import InputRef
from specs.model import ModelSpec
from specs.planted import PlantedRecord, planted_in
from specs.stages import CHAT, TRAINING

NEEDS = " It needs transformers {release} or later; transformers 5.0 opens no Apertus model."
OWN_CODE = (
    " No class of transformers computes its layers: `from_pretrained` needs transformers 5.23 or later and"
    " `trust_remote_code=True`, and runs `{file}` of this folder."
)
TITLES = {
    "pretrain": "pretraining",
    "cooldown": "cooldown",
    "long_context": "longer context",
    "distill": "distillation",
    "domain_weights": "learned weights of sources",
    "sft": "supervised fine-tuning",
    "qrpo": "preference alignment (QRPO)",
    "dpo": "preference alignment (DPO)",
    "reward_model": "reward model (Bradley-Terry)",
    "import_model": "weights of another model",
}
NOT_STATED = "not stated"
NO_DATA = ("parent", "tokenizer", "log_probabilities", "distinct_prompts")  # roles of inputs


def model_card(
    store: Store,
    checkpoint: InputRef,
    evaluations: Sequence[InputRef],
    *,
    title: str,
    model: ModelSpec,
    sequence_length: int,
) -> str:
    """Markdown with the metadata block of Hugging Face. `evaluations`: artifacts whose metrics are shown;
    `title`: name of the recipe; `sequence_length`: longest context, in tokens."""
    ancestors = lineage(store, checkpoint.path or "", checkpoint.step)
    weights = lineage(store, checkpoint.path or "", checkpoint.step, of_weights)
    trained = [ancestor for ancestor in weights if ancestor.kind in (*TRAINING, "merge", "import_model")]
    sources = [ancestor for ancestor in ancestors if ancestor.kind in ("corpus", "conversations")]
    sections = [
        _front_matter(sources, model),
        f"# {title}: {checkpoint.name}\n",
        _summary(model, trained, sequence_length),
        "## Architecture\n",
        _table(("", ""), _architecture(model)),
        "## Training\n",
        _table(
            ("stage", "what", "steps", "tokens", "sequence", "batch", "optimizer", "learning rate", "data"),
            map(_training_row, trained),
        ),
        "Every setting:\n",
        *(_settings(ancestor) for ancestor in trained),
        "## Data\n",
        _table(
            ("source", "language", "licence", "documents", "training tokens", "filters", "left out"),
            map(_data_row, sources),
        ),
    ]
    planted = [
        _planted_row(source, record)
        for source in sources
        for record in planted_in(source.identity.spec, source.metrics)
    ]
    if planted:
        sections += [
            "### Planted documents\n",
            "The training data hold documents that were put there on purpose: canaries, which show what the"
            " model memorises, or texts whose effect is studied.\n",
            _table(("name", "in", "documents", "copies of each", "copies", "tokens", "SHA-256"), planted),
        ]
    sections += _preference_data(store, ancestors)
    if evaluations:
        sections += ["## Evaluation\n", *(_evaluation(store, evaluation) for evaluation in evaluations)]
    sections += [
        "## Lineage\n",
        _table(("part", "kind", "fingerprint", "made"), map(_lineage_row, ancestors)),
        _versions(ancestors),
    ]
    return "\n".join(sections)


def _summary(model: ModelSpec, trained: Sequence[Ancestor], sequence_length: int) -> str:
    """What the model is, what it was trained on, and how it is opened."""
    tokens = sum(ancestor.tokens for ancestor in trained)
    chat = any(ancestor.kind in CHAT or ancestor.spec.get("chat") is True for ancestor in trained)
    reward, own = model.head == "reward", own_class(model)
    begun = [f"{_cell(name)} (licence: {_cell(licence)})" for name, licence in map(_origin, trained) if name]
    return (
        f"A {'reward' if reward else 'decoder-only language'} model of the Apertus architecture with"
        f" {model.parameters:,} parameters,"
        f" trained on {tokens:,} tokens"
        + (f" beginning with {' and '.join(begun)}; " if begun else "; ")
        + f"context of {sequence_length:,} tokens"
        + (
            ". `AutoModelForSequenceClassification` with `trust_remote_code=True` gives the reward of a"
            " conversation, rendered by `tokenizer.apply_chat_template`. transformers' own"
            " `AutoModelForTokenClassification` opens it without code: the reward is then the output at the"
            " last token."
            if reward
            else ", with a chat template (`tokenizer.apply_chat_template`)."
            if chat
            else ". It continues text and follows no instructions."
        )
        + (NEEDS.format(release=LEAST_TRANSFORMERS) if own is None else OWN_CODE.format(file=own.file))
        + " This page was made from the record of its training.\n"
    )


def _preference_data(store: Store, ancestors: Iterable[Ancestor]) -> Iterator[str]:
    """The sections on completions and their rewards; none for a model without them."""
    kinds = ("prompts", "model_folder", "completions", "rewards", "pairs")
    if parts := [ancestor for ancestor in ancestors if ancestor.kind in kinds]:
        yield "## Preference data\n"
        yield _table(("part", "settings", "result"), map(_preference_row, parts))
    if asked := [(part.name, *models) for part in parts if (models := _asked(store, part)) is not None]:
        yield "Models that answered and scored:\n"
        yield _table(("part", "model", "licence"), asked)


def _front_matter(sources: Iterable[Ancestor], model: ModelSpec) -> str:
    declared = ",".join(str(_source(source).get("language", "")) for source in sources)
    languages = sorted({code.strip() for code in declared.split(",")})
    codes = [code for code in languages if code.isascii() and code.isalpha() and len(code) in (2, 3)]
    listed = f"language: [{', '.join(codes)}]\n" if codes else ""
    use = "text-classification" if model.head == "reward" else "text-generation"
    return f"---\nlibrary_name: transformers\npipeline_tag: {use}\n{listed}---\n"


def _architecture(model: ModelSpec) -> list[tuple[Any, ...]]:
    scaling = f", Llama-3 scaling by {model.rope_scaling.factor:g}" if model.rope_scaling else ""
    layers = f"{model.n_layers}, {model.dim:,}, {model.ffn_dim:,} (xIELU, no gate)"
    heads = f"{model.n_heads}, {model.n_kv_heads} of {model.head_dim}, QK-norm"
    mixer = "Mamba-2" if model.decayed_heads else "linear attention"
    return [
        ("layers, width, feed-forward width", layers),
        ("heads (queries, keys and values)", heads),
        *([("sums of earlier layers", f"{model.sum_weights:,} weights")] if model.sum_weights else []),
        *([] if model.plain_stack else [("runs of layers", f"{model.layer_runs} for a token")]),
        *([(f"layers of {mixer}", ", ".join(map(str, model.mamba_layers)))] if model.mamba_layers else []),
        ("vocabulary", f"{model.vocab_size:,}, embeddings not tied"),
        ("rotary embedding", f"base {model.rope_theta:,.0f}{scaling}"),
    ]


def _training_row(ancestor: Ancestor) -> tuple[Any, ...]:
    spec = ancestor.spec
    if ancestor.kind == "merge":
        weights = ", ".join(f"{weight:g}" for weight in spec["weights"])
        title = f"{spec.get('method', 'average')} of checkpoints"
        return (ancestor.name, title, "", "", "", "", "", "", f"weights {weights}")
    if ancestor.kind == "import_model":
        name, licence = _origin(ancestor)
        return (ancestor.name, TITLES["import_model"], *("",) * 6, f"{name}, licence: {licence}")
    optimizer, schedule = spec["optimizer"], spec["schedule"]
    decay = schedule.get("decay", "none")
    final = "" if decay == "none" else f", {decay} to {schedule.get('final', 1.0):g} x"
    rate = f"{optimizer['lr']:g}{final}"
    inputs = ancestor.identity.inputs.items()
    data = [input_.name for role, input_ in inputs if role.partition(":")[0] not in NO_DATA]
    return (
        ancestor.name,
        TITLES[ancestor.kind],
        f"{ancestor.steps:,}",
        f"{ancestor.tokens:,}",
        *(spec["sequence_length"], spec["global_batch_size"], optimizer["name"], rate, ", ".join(data)),
    )


def _origin(ancestor: Ancestor) -> tuple[str, str]:
    """Name and licence of the Hugging Face model that an artifact was made from; empty for anything else."""
    if ancestor.kind not in ("import_model", "model_folder"):
        return "", ""
    return f"hf:{ancestor.spec.get('reference', '')}", str(ancestor.spec.get("license") or NOT_STATED)


def _asked(store: Store, part: Ancestor) -> tuple[str, str] | None:
    """Name and licence of the model that made completions or rewards; None for others, and for a function."""
    model = part.inputs.get("model" if part.kind == "completions" else "reward_model")
    if part.kind == "completions" and model is None:
        return f"{part.spec['sampling']['server']['model']}, of a server", NOT_STATED
    if model is None:
        return None
    if model.place is None:  # a folder
        return model.name, str(part.recorded.get("license") or NOT_STATED)
    ancestors = lineage(store, model.place, None, of_weights)
    origins = [origin for origin in map(_origin, ancestors) if origin[0]]
    name = origins[0][0] if ancestors[-1].kind == "model_folder" else ancestors[-1].inputs["checkpoint"].name
    return name, ", ".join(licence for _, licence in origins) or "trained here"


def _settings(ancestor: Ancestor) -> str:
    """The resolved spec, folded; JSON escapes line breaks, so nothing in it ends the fence."""
    document = json.dumps(ancestor.identity.spec, indent=1, sort_keys=True)
    name = html.escape(ancestor.name)
    return f"<details><summary>{name}</summary>\n\n```json\n{document}\n```\n\n</details>\n"


def _source(ancestor: Ancestor) -> dict[str, Any]:
    return ancestor.recorded.get("source", {})


def _data_row(ancestor: Ancestor) -> tuple[Any, ...]:
    source, metrics = _source(ancestor), ancestor.metrics
    process = ancestor.spec.get("process", {})
    filters = [str(entry["filter"]) for entry in process.get("filters", [])]
    filters += ["personal data replaced"] if process.get("pii") else []
    counts = (metrics.get("rejected") or {}) | (metrics.get("dropped") or {})
    out = {name: count for name, count in counts.items() if count}
    train = metrics.get("train", {})
    documents = train.get("documents", train.get("conversations", ""))
    return (
        *(ancestor.name, source.get("language") or NOT_STATED, source.get("license") or NOT_STATED),
        *(f"{documents:,}" if documents != "" else "", f"{train.get('tokens', 0):,}"),
        ", ".join(filters) or "none",
        ", ".join(f"{count:,} {name}" for name, count in out.items()) or "nothing",
    )


def _planted_row(source: Ancestor, record: PlantedRecord) -> tuple[Any, ...]:
    counts = (f"{count:,}" for count in (record.copies, record.tokens) if count is not None)
    buckets = ", ".join(map(str, record.buckets))
    return (record.name, source.name, record.documents, buckets, *counts, record.digest)


def _preference_row(ancestor: Ancestor) -> tuple[Any, ...]:
    def flat(values: dict[str, Any]) -> str:
        plain = {name: value for name, value in values.items() if isinstance(value, (int, float, str))}
        return ", ".join(f"{name} {_number(value)}" for name, value in plain.items())

    name, licence = _origin(ancestor)
    if name:
        return (ancestor.name, f"{name}, licence: {licence or 'not stated'}", "")
    model = ancestor.manifest.facts.get("model") if ancestor.manifest else None
    spec = ({"model": model} if model else {}) | ancestor.identity.spec
    nested = {
        name: value for inner in spec.values() if isinstance(inner, dict) for name, value in inner.items()
    }
    return (ancestor.name, flat({**spec, **nested, **judge_of(ancestor.recorded)}), flat(ancestor.metrics))


def judge_of(spec: dict[str, Any]) -> dict[str, str]:
    """The model that judged, its constitution and its scale; nothing for a part with another reward. `spec`:
    that of the part, with the fields that were not hashed."""
    judge = (spec.get("reward") or {}).get("judge")
    if not judge:
        return {}
    served = judge.get("server")
    model = judge["from"] if served is None else f"{served['model']} (revision {judge['revision']})"
    lowest, highest = judge["scale"]
    return {"judge": model, "constitution": judge["constitution"], "scale": f"{lowest} to {highest}"}


def _evaluation(store: Store, evaluation: InputRef) -> str:
    part = lineage(store, evaluation.path or "")[-1]
    rows = [(name, _number(value)) for name, value in part.metrics.items() if isinstance(value, (int, float))]
    return f"### {_cell(evaluation.name)}\n\n" + _table(("metric", "value"), rows)


def _lineage_row(ancestor: Ancestor) -> tuple[Any, ...]:
    created = ancestor.manifest.created if ancestor.manifest else ""
    step = f" at step {ancestor.step:,}" if ancestor.step is not None else ""
    return (f"{ancestor.name}{step}", ancestor.kind, f"`{ancestor.identity.fingerprint}`", created)


def _versions(ancestors: Sequence[Ancestor]) -> str:
    manifests = [ancestor.manifest for ancestor in ancestors if ancestor.manifest]
    versions = {f"{name} {version}" for manifest in manifests for name, version in manifest.versions.items()}
    return f"Made with {', '.join(sorted(versions))}.\n"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _cell(value: Any) -> str:
    """Text that stays in its cell: without line breaks, and with pipes, tags and links escaped."""
    text = " ".join(str(value).split())
    for sign in ("\\", "|", "<", "[", "]"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
