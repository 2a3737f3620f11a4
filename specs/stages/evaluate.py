"""The `evaluate` stage: held-out perplexity per source, verbatim continuation of repeated sequences, and gates on any metric."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from specs.base import Spec, execution, identity, reference
from specs.model import ModelSpec
from specs.stages.base import FromCheckpoint
from specs.units import Reference


class Memorisation(Spec):
    """Greedy continuation of the probes of a corpus part that has `repeats`: `prefix` tokens given, `suffix` tokens compared."""

    probes: Reference = reference()
    prefix: int = identity(32, ge=1)
    suffix: int = identity(32, ge=1)


class Gate(Spec):
    """A bound on a metric. A gate that is not met stops what comes after the stage; the metrics stay stored, so editing a bound
    reruns nothing."""

    metric: str = execution(description="for example perplexity/code, perplexity, memorisation/exact/16")
    max: float | None = execution(None)
    min: float | None = execution(None)

    @model_validator(mode="after")
    def _bounded(self) -> Gate:
        if self.max is None and self.min is None:
            raise ValueError("a gate needs max or min")
        return self

    def failure(self, metrics: dict[str, float]) -> str | None:
        """Why the gate is not met, or None."""
        if self.metric not in metrics:
            return f"gate on {self.metric}: there is no such metric; there are {', '.join(sorted(metrics))}"
        value = metrics[self.metric]
        if self.max is not None and not value <= self.max:
            return f"gate on {self.metric}: {value:.6g} is above the allowed {self.max:g}"
        if self.min is not None and not value >= self.min:
            return f"gate on {self.metric}: {value:.6g} is below the required {self.min:g}"
        return None


class EvaluateStage(FromCheckpoint):
    """`sources` are parts of corpora whose held-out split is scored."""

    VERSION: ClassVar[int] = 1
    kind: Literal["evaluate"] = identity()
    sources: list[Reference] = reference(min_length=1)
    samples: int = identity(64, ge=1, description="held-out sequences per source, at most")
    memorisation: Memorisation | None = reference(None)
    gates: list[Gate] = execution(default_factory=list)


class EvaluatePart(Spec):
    """Resolved. Inputs: `checkpoint`, `tokenizer`, `source:<i>`, and `probes` where memorisation is measured."""

    model: ModelSpec = identity()
    sequence_length: int = identity()
    samples: int = identity()
    prefix: int = identity(0, neutral=0)
    suffix: int = identity(0, neutral=0)
    source_names: list[str] = execution(description="names of the sources, for the metrics")
    attention: str = execution("auto")
    batch_size: int = execution(8)
