"""Parts of `preference_data`: prompts -> model -> completions -> rewards -> pairs -> log_probabilities."""

from __future__ import annotations

from typing import cast

from flows.planning.graph import Input, Node
from flows.planning.parts.builder import Builder, reads
from specs.errors import FieldPath
from specs.rewards import CLASSIFIER_FILES, RewardSpec
from specs.stages.export import ExportPart, ExportStage
from specs.stages.model_folder import ModelFolderPart
from specs.stages.preference_data import (
    CompletionsPart,
    LogProbabilitiesPart,
    PairsPart,
    PreferenceDataStage,
    PromptsPart,
    RewardsPart,
    Sampling,
)
from specs.stages.training import Precision
from specs.trajectory import Trajectory
from specs.units import Reference


def add_preference_data(builder: Builder, name: str) -> None:
    """Six parts, each an artifact."""
    stage = cast(PreferenceDataStage, builder.pipeline.stages[name])
    at: FieldPath = ("stages", name)
    checkpoint, trajectory = builder.checkpoint(stage.from_, (*at, "from"))
    length = stage.sequence_length or trajectory.sequence_length
    max_tokens = stage.max_tokens or length // 2
    if 2 * max_tokens > length:
        fix = f"lower it to {length // 2} or raise sequence_length."
        builder.problem(
            (*at, "max_tokens"),
            f"two completions of {max_tokens} tokens do not fit into a sequence of {length}",
            fix,
        )
    _check_pairs(builder, stage, at)
    field: FieldPath = ("max_tokens",) if stage.max_tokens else ("completions", "max_new_tokens")
    check_room(builder, (*at, *field), stage.completions, max_tokens, "max_tokens")
    chosen = PromptsPart(
        split="train",
        limit=stage.limit,
        seed=stage.seed,
        offline=stage.offline,
        max_tokens=max_tokens,
        max_new_tokens=stage.completions.max_new_tokens,
        sampled=stage.completions.n,
        prompts_per_unit=stage.prompts_per_unit,
    )
    prompts = add_prompts(builder, name, stage.prompts, (*at, "prompts"), checkpoint, chosen)
    model = None if stage.completions.by_chat else _sampler(builder, name, stage, checkpoint, trajectory)
    completions = add_completions(builder, name, stage.completions, model, prompts)
    rewards = add_rewards(builder, name, stage.reward, (*at, "reward"), prompts, completions)
    choice = PairsPart(
        pairs=stage.pairs, worst_quantile=stage.worst_quantile, max_tokens=max_tokens, seed=stage.seed
    )
    read = {"prompts": reads(prompts), "completions": reads(completions), "rewards": reads(rewards)}
    pairs = builder.node(f"{name}/pairs", name, choice, read, kind="pairs")
    part = LogProbabilitiesPart(
        model=trajectory.model,
        sequence_length=length,
        precision=stage.precision or Precision(param=trajectory.precision.param),
        parallel=builder.pipeline.launch_of(stage).degrees,
    )
    inputs = {"checkpoint": checkpoint, "pairs": reads(pairs), "tokenizer": builder.tokenizer_of(checkpoint)}
    builder.node(f"{name}/log_probabilities", name, part, inputs, kind="log_probabilities")


def _sampler(
    builder: Builder, name: str, stage: PreferenceDataStage, checkpoint: Input, trajectory: Trajectory
) -> Node:
    """The folder of the model that samples: that of `sampler`, else that of `from`."""
    if stage.sampler is None:
        return add_model(builder, name, checkpoint, trajectory)
    at: FieldPath = ("stages", name)
    if stage.sampler.hugging_face is not None:
        model = builder.graph.models[str(stage.sampler)]
        check_asked(builder, (*at, "sampler"), stage.sampler)
        room = (*at, "completions", "max_new_tokens")
        check_room(builder, room, stage.completions, model.context, f"the context of '{stage.sampler}'")
        return builder.kept_folder(stage.sampler, name, (*at, "sampler"))
    sampled, its = builder.checkpoint(stage.sampler, (*at, "sampler"))
    builder.same_tokenizer(
        (*at, "sampler"), sampled.name, builder.tokenizer_of(sampled), builder.tokenizer_of(checkpoint)
    )
    return add_model(builder, name, sampled, its)


def check_asked(builder: Builder, path: FieldPath, ref: Reference) -> None:
    """A model of another architecture is asked by its own chat template."""
    model = builder.graph.models[str(ref)]
    if not model.chat and model.model is None:
        message = f"'{ref}' has no chat template, so it cannot be asked"
        fix = "put its chat_template.jinja into the folder, or name an instruct model."
        builder.problem(path, message, fix)


def _check_pairs(builder: Builder, stage: PreferenceDataStage, at: FieldPath) -> None:
    """The rule for pairs (`apertus_model.data.choice`) needs two sampled completions, and two that differ."""
    sampling = stage.completions
    if sampling.n < 2:
        message = f"no prompt has a pair with {sampling.n} sampled completion, even with offline ones"
        builder.problem((*at, "completions", "n"), message, "state 2 or more.")
    if sampling.temperature == 0 and not stage.offline:
        message = "no prompt has a pair: at temperature 0 all of its completions are the same"
        builder.problem((*at, "completions", "temperature"), message, "raise it, or state offline: true.")


def check_room(builder: Builder, path: FieldPath, sampling: Sampling, room: int, what: str) -> None:
    """A prompt and its completion share `room` tokens; a prompt has at least one."""
    if sampling.max_new_tokens >= room:
        message = f"max_new_tokens {sampling.max_new_tokens:,} leaves no room for a prompt in {what} {room:,}"
        builder.problem(path, message, f"state max_new_tokens below {room}, or a larger {what}.")


def add_prompts(
    builder: Builder,
    name: str,
    sources: list[Reference],
    path: FieldPath,
    checkpoint: Input | None,
    part: PromptsPart,
) -> Node:
    """The prompts of a stage, from conversations made with the model's tokenizer. Without a `checkpoint`, the
    model has another tokenizer, and the prompts keep that of the conversations."""
    chosen = sorted((builder.part(source) for source in sources), key=lambda read: read.fingerprint)
    tokenizer = builder.tokenizer_of(chosen[0] if checkpoint is None else checkpoint)
    for read in chosen:
        builder.same_tokenizer(path, read.name, builder.tokenizer_of(read), tokenizer)
    inputs = {f"conversations:{index}": read for index, read in enumerate(chosen)} | {"tokenizer": tokenizer}
    return builder.node(f"{name}/prompts", name, part, inputs, kind="prompts")


def add_model(
    builder: Builder, name: str, checkpoint: Input, trajectory: Trajectory, part_name: str = "model"
) -> Node:
    """The checkpoint as a Hugging Face folder; the same artifact as that of an `export` stage with default
    settings."""
    builder.exportable(("stages", name, "from"), trajectory)
    defaults = ExportStage.model_fields
    part = ExportPart(
        model=trajectory.model,
        sequence_length=trajectory.context_length,
        max_shard_size=int(defaults["max_shard_size"].default),
        tolerance=defaults["tolerance"].default,
        chat=trajectory.chat,
    )
    if (existing := builder.graph.nodes.get(f"{name}/{part_name}")) is not None:
        return existing
    inputs = {"checkpoint": checkpoint, "tokenizer": builder.tokenizer_of(checkpoint)}
    return builder.node(f"{name}/{part_name}", name, part, inputs, kind="export")


def add_completions(
    builder: Builder,
    name: str,
    sampling: Sampling,
    model: Node | None,
    prompts: Node,
) -> Node:
    """Completions of the prompts by an exported checkpoint, by the folder of any model, or, without a
    `model`, by one that only a server has."""
    builder.sampled(("stages", name), model, sampling.engine)
    part = CompletionsPart(sampling=sampling, prompts_per_unit=_per_unit(prompts))
    inputs = {} if model is None else {"model": reads(model)}
    inputs["prompts"] = reads(prompts)
    if model is None or isinstance(model.part, ModelFolderPart):
        inputs["tokenizer"] = prompts.inputs["tokenizer"]
    return builder.node(f"{name}/completions", name, part, inputs, kind="completions")


def add_rewards(
    builder: Builder,
    name: str,
    reward: RewardSpec,
    path: FieldPath,
    prompts: Node,
    completions: Node,
) -> Node:
    """Rewards of all completions of the prompts, offline and sampled."""
    inputs = {
        "prompts": reads(prompts),
        "completions": reads(completions),
        "tokenizer": prompts.inputs["tokenizer"],
    }
    if reward.model is not None:
        fix = "name a folder with a sequence classifier of Hugging Face."
        inputs["reward_model"] = builder.folder(
            f"{name}.reward", reward.model, CLASSIFIER_FILES, (*path, "model"), fix
        )
    if reward.from_ is not None:
        checkpoint, trajectory = builder.checkpoint(reward.from_, (*path, "from"))
        inputs["reward_model"] = reads(add_model(builder, name, checkpoint, trajectory, "reward_model"))
    part = RewardsPart(reward=reward, prompts_per_unit=_per_unit(prompts))
    return builder.node(f"{name}/rewards", name, part, inputs, kind="rewards")


def _per_unit(prompts: Node) -> int:
    return cast(PromptsPart, prompts.part).prompts_per_unit
