"""Fine-tuning, preference training and reference log-probabilities on stand-ins for their data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from infra.store import Artifact
from specs.stages.preference_data import LogProbabilitiesPart
from specs.stages.sft import SftLoss
from tests.apertus_model.harness import (
    ListedSamples,
    PreferenceRows,
    SyntheticSamples,
    WeightedSamples,
    segment,
)
from tests.apertus_model.stages.training import PAD, SPEC, Stages

ROWS = 7


class StoredPairs(PreferenceRows):
    """Seven rows of one or two pairs; ids count the sequences backwards, so that they are not in the order
    of the rows."""

    width = 4

    def __init__(self, artifact: Artifact, reference: np.ndarray | None) -> None:
        super().__init__(rows=ROWS)
        sizes = [2 * (1 + row % 2) for row in range(ROWS)]
        ends = np.cumsum(sizes)
        self.sequences = int(ends[-1])
        self.ids = [
            self.sequences - 1 - np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)
        ]
        values = np.zeros(self.sequences, np.float32) if reference is None else reference
        self.reference = np.stack([np.resize(values[ids], 4) * (np.arange(4) < len(ids)) for ids in self.ids])

    @classmethod
    def open(
        cls,
        pairs: Artifact,
        log_probabilities: Artifact | None,
        *,
        sequence_length: int,
        pad_id: int,
        sides: int,
    ) -> "StoredPairs":
        assert (sequence_length, pad_id, sides) == (16, PAD, 2)
        stored = (
            None
            if log_probabilities is None
            else np.load(log_probabilities.local("log_probabilities.npy"), allow_pickle=False)
        )
        return cls(pairs, stored)

    def sequence_ids(self, row: int) -> np.ndarray:
        return self.ids[row]

    def trained_rows(self) -> np.ndarray:
        return np.arange(ROWS)


def stored_conversations(
    shards: Any, repeats: list[int], *, loss: SftLoss, pad_id: int, **unused: Any
) -> Any:
    """Four rows per pass; a source is seen as often as it is repeated."""
    assert pad_id == PAD
    assert [split for _, split in shards] == ["train"] * len(repeats)
    samples: Any = WeightedSamples() if loss.prompt_weight else ListedSamples()
    samples.epochs = lambda n: [times * n / 4 for times in repeats]
    return samples


def heldout(shards: Any, **unused: Any) -> list[Any]:
    ((artifact, split),) = shards
    assert split == "validation"
    return [SyntheticSamples()[2000 + index + len(artifact.path)] for index in range(3)]


@contextmanager
def small_data_classes() -> Iterator[None]:
    """Puts the classes of this module in place of those that read data."""
    classes = {
        "conversations.samples.ConversationSamples": stored_conversations,
        "conversations.samples.heldout": heldout,
        "conversations.stored.ConversationShards": lambda artifact, split: (artifact, split),
        "preferences.samples.PreferenceSamples": StoredPairs,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, stands_in in classes.items():
            patch.setattr(f"apertus_model.data.{name}", stands_in)
        yield


def sft(**changes: Any) -> Any:
    fields = {
        "seed": None,
        "repeats": [1, 3],
        "source_names": ["chat", "identity"],
        "validation": {"interval": 2, "samples": 2},
    }
    return segment("sft", **{**fields, **changes})


def sft_inputs(stages: Stages, parent: str = "pretrain/trained", step: int = 6) -> dict[str, Any]:
    sources = {
        f"conversations:{index}": stages.ref(f"conversations/{name}")
        for index, name in enumerate(("chat", "identity"))
    }
    return {**sources, "parent": stages.ref(parent, step)}


def reference_part(**changes: Any) -> LogProbabilitiesPart:
    fields = {
        "model": SPEC.model,
        "sequence_length": 16,
        "precision": {"param": "float32"},
        "batch_size": 2,
        "sequences_per_unit": 3,
    }
    return LogProbabilitiesPart(**{**fields, **changes})


def run_reference(
    stages: Stages,
    name: str,
    *,
    checkpoint: str = "sft/tuned",
    step: int = 6,
    processes: int = 1,
    **changes: Any,
) -> Artifact:
    inputs = {"checkpoint": stages.ref(checkpoint, step), "pairs": stages.ref("pairs/pairs")}
    part = reference_part(**changes)
    return stages.run("log_probabilities", name, part, inputs=inputs, processes=processes)


def stored_values(artifact: Artifact) -> np.ndarray:
    return np.load(artifact.local("log_probabilities.npy"), allow_pickle=False)
