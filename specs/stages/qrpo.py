"""The `qrpo` stage: quantile reward policy optimisation (arXiv 2507.08068)."""

from typing import ClassVar, Literal

from specs.base import Spec, identity
from specs.stages.preference_training import PreferenceSegment, PreferenceTraining, preference_sets
from specs.stages.sft import Repeats


class QrpoLoss(Spec):
    """The loss (q - beta_i ln Z(beta_i) - beta_i (ln p(y|x) - ln p_ref(y|x)))^2 of a completion, where Z(b) =
    b (exp(1/b) - 1), and q is the quantile of the reward among the reference completions; beta_i = beta /
    |y|, at most `beta_max`, if it is normalised by length (Apertus report, section 4.3)."""

    beta: float = identity(5.0, gt=0)
    length_normalised: bool = identity(True)
    beta_max: float | None = identity(0.1, gt=0, description="limit of the normalised beta of a completion")


class QrpoSegment(PreferenceSegment):
    """A resolved segment of QRPO."""

    OBJECTIVE: ClassVar[str] = "qrpo"
    loss: QrpoLoss = identity()


class QrpoStage(PreferenceTraining):
    """Regresses the log-ratio of every completion on its quantile reward; chosen and rejected ones count
    alike, so it also trains on completions without pairs."""

    VERSION: ClassVar[int] = 1
    SEGMENT = QrpoSegment
    kind: Literal["qrpo"] = identity()
    preferences: Repeats = preference_sets("preference_data", "rewarded_completions")
    loss: QrpoLoss = identity(default_factory=QrpoLoss)
