"""The teacher of a `distill` stage: an input of every segment, or a part before it that stores the teacher's
predictions."""

from typing import Any, cast

from flows.planning.graph import Input
from flows.planning.parts.builder import Builder, reads
from specs.settings import Phase
from specs.stages.distill import DistillStage, TeacherTokensPart
from specs.stages.training import TrainingStage
from specs.trajectory import SegmentPlan, different_fields

MIXTURE_INPUTS = ("mixture", "packed:", "excluded:")


def add_teacher(
    builder: Builder,
    stage: TrainingStage,
    phase: Phase,
    planned: SegmentPlan,
    name: str,
    inputs: dict[str, Input],
    fields: dict[str, Any],
) -> tuple[dict[str, Input], dict[str, Any]]:
    """The teacher of the segment `name` as an input, and the fields of its kind. `inputs` and `fields` are
    the other inputs and fields of the segment."""
    stage, path = cast(DistillStage, stage), (*phase.path, "teacher")
    teacher, trajectory = builder.checkpoint(stage.teacher, path)
    student = builder.graph.trajectories[phase.name].model
    if trajectory.model.vocab_size != student.vocab_size:
        words = f"{trajectory.model.vocab_size:,} words, the student's {student.vocab_size:,}"
        message = f"the vocabulary of '{stage.teacher}' has {words}"
        builder.problem(path, message, "give both one vocab_size, and one tokenizer.")
    if stage.top_k is not None and stage.top_k >= student.vocab_size:
        message = f"top_k {stage.top_k} leaves out no word of a vocabulary of {student.vocab_size}"
        builder.problem((*phase.path, "top_k"), message, "lower it, or leave it out.")
    full = student.model_copy(update={"mamba": None})
    if stage.loss.compare != "logits" and (others := different_fields(trajectory.model, full)):
        message = f"'{stage.teacher}' and the student with attention in all layers differ in {others}"
        builder.problem(path, message, "name the checkpoint whose attention was replaced.")
    imported = builder.graph.nodes[teacher.name].imported
    models = teacher if imported else builder.tokenizer_of(teacher)
    builder.same_tokenizer(path, inputs["mixture"], models)
    taught = {"teacher": trajectory.model}
    if stage.top_k is None:
        return {"teacher": teacher}, taught
    part = TeacherTokensPart(
        model=trajectory.model,
        **{name: fields[name] for name in ("sequence_length", "packing", "excluded", "attention")},
        parallel=fields["parallel"].without_pipeline,
        first_sample=fields["sample_offset"],
        samples=planned.end_sample - planned.start_sample,
        top_k=stage.top_k,
        temperature=stage.loss.temperature,
        precision=fields["precision"].model_copy(update={"linear": "param"}),
        **({"batch_size": fields["micro_batch_size"]} if fields["micro_batch_size"] else {}),
    )
    own = {role: input_ for role, input_ in inputs.items() if role.startswith(MIXTURE_INPUTS)}
    own |= {"checkpoint": teacher, "tokenizer": inputs["tokenizer"]}
    node = builder.node(f"{name}/teacher", phase.stage, part, own, kind="teacher_tokens")
    return {"teacher": reads(node)}, taught
