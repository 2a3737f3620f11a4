"""The `distill` stage: a student that is trained on the predictions of a teacher."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath, SpecError
from specs.mamba import NewMixers
from specs.model import ModelSpec
from specs.settings import MixtureTraining, Packing, Phase
from specs.stages.pretrain import without_parent
from specs.stages.training import CarryField, ForwardPart, Segment, TrainingStage, carries
from specs.units import Reference


class DistillLoss(Spec):
    """The loss weight T^2 KL + (1 - weight) ce: a mean over the trained tokens of a step, where KL is the
    divergence between softmax(logits / T) of teacher and student (arXiv 1503.02531), and ce the cross-entropy
    of the labels. With `compare: matrix` or `hidden`, instead the difference of the student's Mamba-2 layers
    from the teacher's attention."""

    compare: Literal["logits", "matrix", "hidden"] = option(
        "logits",
        description="matrix, hidden: each layer of Mamba-2 reads what the teacher's attention reads there,"
        " and nothing else is trained or computed (arXiv 2408.10189). matrix: the Frobenius norm of the"
        " difference of its matrix of tokens, with d on the diagonal, from softmax(Q K'), a mean over heads"
        " and sequences; it takes 4 bytes for each head and pair of tokens of each such layer. hidden: the"
        " length of the difference of what a token gets, a mean over tokens",
    )
    direction: Literal["forward", "reverse"] = identity(
        "forward",
        description="forward: KL(teacher || student), smallest where the student expects all that the"
        " teacher does; reverse: KL(student || teacher), smallest where it expects nothing else",
    )
    temperature: float = identity(1.0, ge=0.01, le=100, description="T")
    weight: float = identity(1.0, gt=0, le=1, description="weight of the divergence beside cross-entropy")

    def conflicts(self) -> Iterator[str]:
        fields = type(self).model_fields
        others = [
            name for name in fields if getattr(self, name) != fields[name].default and name != "compare"
        ]
        if self.compare != "logits" and others:
            yield f"{others[0]} has no meaning with compare: {self.compare}; leave it out"


class DistillSegment(Segment):
    """A resolved segment. Further input: `teacher`, a checkpoint, or with `top_k` the artifact of a
    `TeacherTokensPart`."""

    teacher: ModelSpec = identity()
    loss: DistillLoss = identity()
    top_k: int | None = option(None)
    mamba: NewMixers | None = option(None)

    @property
    def data_class(self) -> str:
        return "MixtureData" if self.top_k is None else "TaughtMixtureData"

    @property
    def teacher_beside(self) -> ModelSpec | None:
        return self.teacher if self.top_k is None else None

    @property
    def compared(self) -> Literal["matrix", "hidden"] | None:
        return None if self.loss.compare == "logits" else self.loss.compare

    @property
    def stored_words(self) -> int:
        return self.top_k or 0

    @property
    def new_parameters(self) -> tuple[str, ...]:
        return () if self.mamba is None else self.mamba.new_parameters(self.model.n_layers)

    @property
    def objective(self) -> str:
        if self.loss.compare != "logits":
            return "alignment"
        return "distillation" if self.top_k is None else "stored-distillation"


class DistillStage(MixtureTraining, TrainingStage):
    """The teacher is any checkpoint with the student's tokenizer and vocabulary, such as a larger model. The
    student begins with the weights of `from`, or with new weights of `model`, which need every setting
    stated, as in `pretrain`."""

    VERSION: ClassVar[int] = 1
    SEGMENT = DistillSegment
    kind: Literal["distill"] = identity()
    teacher: Reference = reference(to="checkpoint", description="a checkpoint, or hf:<folder or id>")
    from_: Reference | None = reference(None, alias="from", to="checkpoint")
    model: ModelSpec | None = identity(None)
    mamba: NewMixers | None = option(None, description="layers of `from` whose attention becomes Mamba-2")
    seed: int = identity(28, description="seed of new weights")
    carry: CarryField = carries("weights")
    loss: DistillLoss = identity(default_factory=DistillLoss)
    top_k: int | None = identity(
        None,
        ge=1,
        le=2**16,
        description="the teacher runs once, before training, in a part that stores its k most likely words"
        " of each token, and the probability of all others as one; what is stored takes 8 k + 4 bytes a"
        " token, and another budget is other tokens. By default the teacher runs beside the student, and"
        " nothing is left out",
    )

    def conflicts(self) -> Iterator[str]:
        if (self.from_ is None) == (self.model is None):
            yield "a student begins with a checkpoint or with new weights; set from or model"
        if self.model is not None:
            yield from without_parent(self, self.model, "a distill stage with new weights")
        if self.mamba is not None and self.from_ is None:
            yield "mamba replaces the attention of a checkpoint; set model.mamba for new weights"
        if self.mamba is not None and self.carry != ["weights"]:
            yield "mamba makes new parameters, without optimizer states; set carry: [weights]"
        whole_passes = {
            "top_k": self.top_k is not None,
            "compile": self.compile,
            "activation_checkpointing": self.activation_checkpointing != "none",
        }
        if self.loss.compare != "logits" and any(whole_passes.values()):
            field = next(name for name in whole_passes if whole_passes[name])
            yield f"{field} is for whole forward passes; compare: {self.loss.compare} runs mixers alone"
        if self.top_k is not None and self.model is not None and self.top_k >= self.model.vocab_size:
            yield (
                f"top_k {self.top_k} leaves out no word of a vocabulary of {self.model.vocab_size}; lower"
                " it, or leave it out"
            )

    @property
    def teacher_model(self) -> Reference:
        return self.teacher

    def trained(self, model: ModelSpec, at: FieldPath) -> list[str]:
        if self.loss.compare == "logits":
            return self.trainable
        if not model.mamba_layers:
            message = f"no layer of '{self.from_}' mixes tokens by Mamba-2, so there is nothing to compare"
            raise SpecError.of((*at, "loss"), message, "set mamba, or compare: logits.")
        return self.trainable or [f"layers.{layer}.attention.*" for layer in model.mamba_layers]

    @property
    def objective(self) -> str:
        return "distillation" if self.loss.compare == "logits" else "alignment"

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        if self.loss.compare == "logits":
            return super().obstacle(to)
        return "each process must have whole layers and sequences, in the parameters' precision"

    def phases(self, name: str) -> list[Phase]:
        carry = () if self.from_ is None else tuple(self.carry)
        seed = self.seed if self.from_ is None or self.mamba is not None else None
        phase = Phase(name, name, ("stages", name), self, self.from_, carry=carry, mamba=self.mamba)
        return [replace(phase, model=self.model, seed=seed)]


class TeacherTokensPart(ForwardPart):
    """A resolved part with the most likely words of a teacher after each token of a segment's samples.
    Inputs: `checkpoint`, `tokenizer`, and `mixture`, `packed:<i>`, `excluded:<i>` of the segment, which reads
    it."""

    VERSION: ClassVar[int] = 1
    packing: Packing = option("concatenate")
    excluded: list[int] = option(default_factory=list)
    first_sample: int = identity(description="index of the first sample in the mixture")
    samples: int = identity()
    top_k: int = identity()
    temperature: float = identity()
    samples_per_unit: int = execution(64)
