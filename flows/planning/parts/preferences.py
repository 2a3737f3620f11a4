"""Parts of `preference_data`: prompts -> model -> completions -> rewards -> pairs -> log_probabilities.

Of these, training reads the last two."""

from typing import cast

from apertus_model.files import read_text
from flows.planning.graph import Input, Node
from flows.planning.parts.builder import Builder, numbered, reads, shared
from infra.store.hugging_face import stated_license
from infra.store.inputs import SourceError
from specs.errors import FieldPath
from specs.judge import Judge, clauses
from specs.rewards import CLASSIFIER_FILES, RewardSpec
from specs.settings import Phase, Precision
from specs.sources import SourceSpec
from specs.stages.export import ExportPart, ExportStage
from specs.stages.preference_data import (
    CompletionsPart,
    LogProbabilitiesPart,
    PairsPart,
    Personas,
    PreferenceDataStage,
    PreferenceSet,
    PromptsPart,
    RewardsPart,
    Sampling,
)
from specs.stages.preference_training import DistinctPromptsPart, PreferenceTraining
from specs.stages.rewarded_completions import RewardedCompletionsPart, RewardedCompletionsStage
from specs.trajectory import Trajectory
from specs.units import Reference


def add_preference_data(builder: Builder, name: str, stage: PreferenceDataStage) -> None:
    """Adds six parts, and two for each generator; each part is an artifact."""
    at: FieldPath = ("stages", name)
    checkpoint, trajectory = builder.checkpoint(stage.from_, (*at, "from"))
    length = stage.sequence_length or trajectory.settings.sequence_length
    max_tokens = stage.max_tokens or length // 2
    if 2 * max_tokens > length:
        message = f"two completions of {max_tokens} tokens do not fit into a sequence of {length}"
        fix = f"lower it to {length // 2} or raise sequence_length."
        builder.problem((*at, "max_tokens"), message, fix)
    _check_pairs(builder, stage, at)
    field: FieldPath = ("max_tokens",) if stage.max_tokens else ("completions", "max_new_tokens")
    what = "max_tokens" if stage.max_tokens else "max_tokens (half of sequence_length)"
    check_room(builder, (*at, *field), stage.completions, max_tokens, what)
    own = {"split": "train", "max_tokens": max_tokens, "sampled": stage.completions.n}
    own["max_new_tokens"] = stage.completions.max_new_tokens
    chosen = PromptsPart(**shared(stage, PromptsPart) | own)
    prompts = add_prompts(builder, name, stage.prompts, (*at, "prompts"), checkpoint, chosen, (*at, *field))
    model = None
    if not stage.completions.by_chat:
        room = (*at, "completions", "max_new_tokens")
        if stage.sampler is None:
            model = add_model(builder, name, checkpoint, trajectory)
        else:
            path, sampling = (*at, "sampler"), stage.completions
            model = _sampler(builder, name, stage.sampler, path, room, sampling, checkpoint)
    completions = add_completions(builder, name, stage.completions, model, prompts)
    generated = {
        f"generated:{number}": reads(_add_generator(builder, name, key, max_tokens, checkpoint, prompts))
        for number, key in enumerate(stage.generators)
    }
    rewards = add_rewards(builder, name, stage.reward, (*at, "reward"), prompts, completions, generated)
    choice = PairsPart(**shared(stage, PairsPart) | {"max_tokens": max_tokens})
    inputs = {"prompts": reads(prompts), "completions": reads(completions), **generated}
    pairs = builder.node(f"{name}/pairs", name, choice, inputs | {"rewards": reads(rewards)}, kind="pairs")
    add_log_probabilities(builder, name, reads(pairs), checkpoint, trajectory)


def add_rewarded_completions(builder: Builder, name: str, stage: RewardedCompletionsStage) -> None:
    """Adds two parts: the completions with their quantiles, and their log-probabilities."""
    at = ("stages", name)
    checkpoint, trajectory = builder.checkpoint(stage.from_, (*at, "from"))
    length = stage.sequence_length or trajectory.settings.sequence_length
    if stage.max_tokens is not None and stage.max_tokens > length:
        message = f"a completion of {stage.max_tokens} tokens does not fit into a sequence of {length}"
        fix = f"lower it to {length} or raise sequence_length."
        builder.problem((*at, "max_tokens"), message, fix)
    own = {"max_tokens": stage.max_tokens or length}
    part = RewardedCompletionsPart(**shared(stage, RewardedCompletionsPart) | own)
    inputs = conversations(builder, stage.completions, (*at, "completions"), checkpoint)
    shortest = builder.shortest(map(builder.part, stage.completions), "train", "shortest_prompt")
    if shortest >= part.max_tokens:
        message = f"no completion fits: the shortest prompt alone has {shortest} tokens, of {part.max_tokens}"
        fix = f"raise it, and sequence_length, here and in the stages that read this one, above {shortest}."
        builder.problem((*at, "max_tokens"), message, fix)
    completions = builder.node(f"{name}/completions", name, part, inputs)
    add_log_probabilities(builder, name, reads(completions), checkpoint, trajectory)


def add_log_probabilities(
    builder: Builder, name: str, pairs: Input, checkpoint: Input, trajectory: Trajectory
) -> Node:
    """Adds the log-probabilities of a stage's pairs under a model, over its sequences and in its precision
    unless a set of preferences states its own."""
    stage = builder.pipeline.stages[name]
    own = cast(PreferenceSet, stage)  # or a training stage, which has both fields as well
    part = LogProbabilitiesPart(
        model=trajectory.model,
        sequence_length=own.sequence_length or trajectory.settings.sequence_length,
        precision=own.precision or Precision(param=trajectory.settings.precision.param),
        parallel=builder.pipeline.launch_of(stage).degrees,
    )
    inputs = {"checkpoint": checkpoint, "pairs": pairs, "tokenizer": builder.tokenizer_of(checkpoint)}
    return builder.node(f"{name}/log_probabilities", name, part, inputs, kind="log_probabilities")


def _sampler(
    builder: Builder,
    name: str,
    ref: Reference,
    at: FieldPath,
    room: FieldPath,
    sampling: Sampling,
    checkpoint: Input,
    part_name: str = "model",
) -> Node:
    """The folder of a model that answers in place of the model of `from`, whose checkpoint is given. `room`:
    the path of the field that states how many tokens it may sample."""
    if ref.hugging_face is not None:
        check_asked(builder, at, ref)
        check_room(builder, room, sampling, builder.graph.models[str(ref)].context, f"the context of '{ref}'")
        return builder.kept_folder(ref, name, at, part_name)
    sampled, its = builder.checkpoint(ref, at)
    builder.same_tokenizer(at, sampled, builder.tokenizer_of(checkpoint))
    return add_model(builder, name, sampled, its, part_name)


def _add_generator(
    builder: Builder, name: str, key: str, max_tokens: int, checkpoint: Input, prompts: Node
) -> Node:
    at: FieldPath = ("stages", name, "generators", key)
    generator = cast(PreferenceDataStage, builder.pipeline.stages[name]).generators[key]
    sampling, room = generator.completions, (*at, "completions", "max_new_tokens")
    check_room(builder, room, sampling, max_tokens, "max_tokens")
    model, personas = None, None
    if generator.from_ is not None:
        path, part_name = (*at, "from"), f"{key}/model"
        model = _sampler(builder, name, generator.from_, path, room, sampling, checkpoint, part_name)
    if generator.personas is not None:
        personas = builder.outside(
            f"{name}.{key}.personas", generator.personas, (*at, "personas", "url"), "correct the url."
        )
    return add_completions(
        builder, name, sampling, model, prompts, f"{key}/completions", generator.personas, personas
    )


def check_asked(builder: Builder, path: FieldPath, ref: Reference) -> None:
    """Checks that a model of another architecture has a chat template, with which it is asked."""
    model = builder.graph.models[str(ref)]
    if not model.chat and model.model is None:
        message = f"'{ref}' has no chat template, so it cannot be asked"
        fix = "put its chat_template.jinja into the folder, or name an instruct model."
        builder.problem(path, message, fix)


def _check_pairs(builder: Builder, stage: PreferenceDataStage, at: FieldPath) -> None:
    """Checks that prompts can have pairs: the rule for pairs (`data/preferences/choice.py`) needs two sampled
    completions, and two completions that differ."""
    sampling = stage.completions
    if sampling.n < 2:
        message = f"no prompt has a pair with {sampling.n} sampled completion, even with offline ones"
        builder.problem((*at, "completions", "n"), message, "set 2 or more.")
    if sampling.temperature == 0 and not stage.offline and not stage.generators:
        message = "no prompt has a pair: at temperature 0 all of its completions are the same"
        builder.problem((*at, "completions", "temperature"), message, "raise it, or set offline: true.")


def check_room(builder: Builder, path: FieldPath, sampling: Sampling, room: int, what: str) -> None:
    """Checks that a prompt has room for at least one token: it shares `room` tokens with its completion."""
    if sampling.max_new_tokens >= room:
        message = f"max_new_tokens {sampling.max_new_tokens:,} leaves no room for a prompt in {what} {room:,}"
        builder.problem(path, message, f"set max_new_tokens below {room}, or a larger {what}.")


def add_prompts(
    builder: Builder,
    name: str,
    sources: list[Reference],
    path: FieldPath,
    checkpoint: Input | None,
    part: PromptsPart,
    room: FieldPath,
) -> Node:
    """Adds the prompts of a stage, from conversations made with the model's tokenizer. Without a
    `checkpoint`, the model has another tokenizer, and the prompts keep that of the conversations. `room`:
    the path of the field that leaves room for them."""
    inputs = conversations(builder, sources, path, checkpoint)
    shortest = builder.shortest(map(builder.part, sources), part.split, "shortest_prompt")
    needed = shortest + part.max_new_tokens
    if shortest and part.max_new_tokens < part.max_tokens < needed:  # without any room: `check_room`
        left = part.max_tokens - part.max_new_tokens
        message = (
            f"no prompt fits: the shortest has {shortest} tokens or more, and of max_tokens {part.max_tokens}"
            f" max_new_tokens {part.max_new_tokens} leaves {left}"
        )
        longer = (
            f", or set max_tokens to {needed} or more and sequence_length to {2 * needed} or more, here and"
            " in the stages that read this one"
        )
        fix = f"lower max_new_tokens{longer if part.split == 'train' else ''}."
        builder.problem(room, message, fix)
    return builder.node(f"{name}/prompts", name, part, inputs, kind="prompts")


def conversations(
    builder: Builder, sources: list[Reference], path: FieldPath, checkpoint: Input | None
) -> dict[str, Input]:
    """Conversations of one tokenizer, that of any given checkpoint, and the tokenizer."""
    chosen = builder.parts(sources)
    tokenizer = builder.tokenizer_of(chosen[0] if checkpoint is None else checkpoint)
    for input_ in chosen:
        builder.same_tokenizer(path, input_, tokenizer)
    return numbered("conversations", chosen) | {"tokenizer": tokenizer}


def add_model(
    builder: Builder, name: str, checkpoint: Input, trajectory: Trajectory, part_name: str = "model"
) -> Node:
    """Adds the checkpoint as a Hugging Face folder, which is the same artifact as that of an `export` stage
    with default settings."""
    builder.exportable(("stages", name, "from"), trajectory)
    part = exported(ExportStage.model_construct(), trajectory)
    inputs = {"checkpoint": checkpoint, "tokenizer": builder.tokenizer_of(checkpoint)}
    return builder.node(f"{name}/{part_name}", name, part, inputs, kind="export")


def exported(stage: ExportStage, trajectory: Trajectory) -> ExportPart:
    own = {"model": trajectory.model, "sequence_length": trajectory.context_length, "chat": trajectory.chat}
    return ExportPart(**shared(stage, ExportPart) | own)


def add_completions(
    builder: Builder,
    name: str,
    sampling: Sampling,
    model: Node | None,
    prompts: Node,
    part_name: str = "completions",
    personas: Personas | None = None,
    persona_files: Input | None = None,
) -> Node:
    """Adds completions of the prompts by an exported checkpoint, by the folder of any model, or, without a
    `model`, by a model that only a server has."""
    builder.sampled(("stages", name), model, sampling.engine)
    part = CompletionsPart(sampling=sampling, personas=personas, prompts_per_unit=_per_unit(prompts))
    inputs = {} if model is None else {"model": reads(model)}
    inputs["prompts"] = reads(prompts)
    if model is None or model.kind == "model_folder":
        inputs["tokenizer"] = prompts.inputs["tokenizer"]
    if persona_files is not None:
        inputs["personas"] = persona_files
    return builder.node(f"{name}/{part_name}", name, part, inputs, kind="completions")


def add_rewards(
    builder: Builder,
    name: str,
    reward: RewardSpec,
    path: FieldPath,
    prompts: Node,
    completions: Node,
    generated: dict[str, Input] | None = None,
) -> Node:
    """Adds the rewards of all completions of the prompts, offline and sampled."""
    inputs = {
        "prompts": reads(prompts),
        "completions": reads(completions),
        **(generated or {}),
        "tokenizer": prompts.inputs["tokenizer"],
    }
    inputs |= reward_inputs(builder, name, reward, path)
    licence = ""
    if reward.model is not None and f"{name}.reward" in builder.graph.listings:
        licence = stated_license(reward.model)
    part = RewardsPart(reward=reward, license=licence, prompts_per_unit=_per_unit(prompts))
    return builder.node(f"{name}/rewards", name, part, inputs, kind="rewards")


def reward_inputs(builder: Builder, name: str, reward: RewardSpec, path: FieldPath) -> dict[str, Input]:
    """The inputs of a reward besides completions: its model, and the constitution of a judge."""
    if reward.judge is not None:
        return _judge_inputs(builder, name, reward, reward.judge, path)
    if reward.model is not None:
        fix = "name a folder with a sequence classifier of Hugging Face."
        at = (*path, "model")
        return {"reward_model": builder.folder(f"{name}.reward", reward.model, CLASSIFIER_FILES, at, fix)}
    if reward.from_ is not None:
        checkpoint, trajectory = builder.checkpoint(reward.from_, (*path, "from"))
        return {"reward_model": reads(add_model(builder, name, checkpoint, trajectory, "reward_model"))}
    return {}


def _judge_inputs(
    builder: Builder, name: str, reward: RewardSpec, judge: Judge, path: FieldPath
) -> dict[str, Input]:
    at = (*path, "judge", "constitution")
    fix = "name a file whose clauses begin with their numbers, such as [2.1], 2.1 or 2."
    source = SourceSpec(url=judge.constitution, format="text")
    inputs = {"constitution": builder.outside(f"{name}.constitution", source, at, fix)}
    if judge.constitution not in builder.graph.unavailable:
        try:
            clauses(read_text(judge.constitution))
        except (SourceError, ValueError) as error:
            builder.problem(at, f"{judge.constitution}: {error}", fix)
    if judge.from_ is None:
        return inputs
    at = (*path, "judge", "from")
    if judge.from_.hugging_face is not None:
        asked = builder.graph.models[str(judge.from_)]
        chat, context = asked.chat, asked.context
        model = builder.kept_folder(judge.from_, name, at, "judge")
    else:
        checkpoint, trajectory = builder.checkpoint(judge.from_, at)
        chat, context = trajectory.chat, trajectory.context_length
        model = add_model(builder, name, checkpoint, trajectory, "judge")
    if not chat:
        message = f"'{judge.from_}' has no chat template, so it cannot be asked"
        builder.problem(at, message, "name an instruct model.")
    if reward.max_tokens > context:
        message = f"max_tokens {reward.max_tokens:,} is above the context {context:,} of '{judge.from_}'"
        builder.problem((*path, "max_tokens"), message, f"set {context} or less.")
    builder.sampled((*path, "judge", "engine"), model, judge.engine)
    return inputs | {"judge": reads(model)}


def _per_unit(prompts: Node) -> int:
    return cast(PromptsPart, prompts.part).prompts_per_unit


def preference_inputs(builder: Builder, stage: PreferenceTraining, phase: Phase) -> dict[str, Input]:
    """The pairs of each set (or its single completions) and their log-probabilities; for several sets, also a
    part of the stage that says which pairs are trained on."""
    several = len(stage.preferences) > 1
    inputs: dict[str, Input] = {}
    for number, name in enumerate(stage.preferences):
        of_set = {
            "pairs": _of_kind(builder, name, "pairs", "rewarded_completions"),
            "log_probabilities": _of_kind(builder, name, "log_probabilities"),
        }
        inputs |= {f"{role}:{number}" if several else role: reads(node) for role, node in of_set.items()}
    if several:
        part_name = f"{phase.stage}/distinct_prompts"
        part = DistinctPromptsPart(repeated_prompts=stage.repeated_prompts, names=list(stage.preferences))
        pairs = {role: input_ for role, input_ in inputs.items() if role.startswith("pairs")}
        node = builder.node(part_name, phase.stage, part, pairs, kind="distinct_prompts")
        inputs["distinct_prompts"] = reads(node)
    return inputs


def check_preferences(builder: Builder, stage: PreferenceTraining, phase: Phase, parent: Input) -> None:
    """Checks that the reference of the loss is the model that training begins with, that its
    log-probabilities are of the sequences that are trained on, and that sets do not share their prompts."""
    at = phase.path
    trajectory = builder.graph.trajectories[phase.name]
    owners: dict[str, str] = {}  # conversations -> the first set with prompts from them
    for name in stage.preferences:
        reference = _of_kind(builder, name, "log_probabilities")
        checkpoint, part = reference.inputs["checkpoint"], cast(LogProbabilitiesPart, reference.part)
        if parent.hashed != checkpoint.hashed:
            model = f"step {checkpoint.step} of '{checkpoint.name}'"
            message = f"'{name}' was made with {model}, but this stage starts from '{phase.parent}'"
            fix = "start from the checkpoint that the preference data name."
            builder.problem((*at, "from"), message, fix)
        if trajectory.settings.sequence_length != part.sequence_length:
            own = trajectory.settings.sequence_length
            message = f"'{name}' has sequence_length {part.sequence_length}, this stage {own}"
            builder.problem((*at, "sequence_length"), message, f"set {part.sequence_length}.")
        if trajectory.settings.precision != part.precision:
            precisions = (
                f"{part.precision.param}, this stage computes in {trajectory.settings.precision.param}"
            )
            message = f"the log-probabilities of '{name}' are in {precisions}"
            builder.problem((*at, "preferences"), message, "set the same precision in both.")
        for role, input_ in _of_kind(builder, name, "prompts", "rewarded_completions").inputs.items():
            first = owners.setdefault(input_.fingerprint, name) if role.startswith("conversations:") else name
            if first != name and stage.repeated_prompts == "error":
                message = f"'{first}' and '{name}' both take prompts from '{input_.name}'"
                fix = "name other prompts in one of them, or set repeated_prompts: first."
                builder.problem((*at, "preferences"), message, fix)


def _of_kind(builder: Builder, stage: str, *kinds: str) -> Node:
    """The one part of a stage that has one of these kinds."""
    return next(node for node in builder.graph.of(stage) if node.kind in kinds)
