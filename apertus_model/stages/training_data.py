"""What a segment trains on, opened from its inputs: windows of a mixture, packed conversations, or packed pairs of completions.

Invariant: every kind of data is seen through `TrainingData`; which one a job has follows from the kind of its segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from apertus_model.data.corpora import split_shards
from apertus_model.data.samples import MixtureSamples, validation_samples
from apertus_model.trainer.loader import SampleLike, Samples
from infra.store import Artifact, Store
from infra.store.ranges import BlockCache
from specs.job import Job
from specs.stages.preference_training import PreferenceSegment
from specs.stages.sft import SftSegment
from specs.stages.training import Segment


class CountedSamples(Samples, Protocol):
    """Training samples that know how often they go through each source."""

    def epochs(self, n: int, /) -> list[float]:
        """Passes over each source after n samples."""


class TrainingData(Protocol):
    """`samples` to train on; `heldout` sequences by source; `names` and `fingerprints` of the sources, in the order of `samples.epochs`."""

    samples: CountedSamples
    heldout: dict[str, Sequence[SampleLike]]
    names: list[str]
    fingerprints: list[str]


def open_data(store: Store, job: Job, segment: Segment) -> TrainingData:
    """The data of a job's segment."""
    if isinstance(segment, SftSegment):
        return ConversationData(store, job, segment)
    if isinstance(segment, PreferenceSegment):
        return PreferenceData(store, job, segment)
    return MixtureData(store, job, segment)


class MixtureData:
    """Windows over the documents of a mixture."""

    def __init__(self, store: Store, job: Job, segment: Segment) -> None:
        recipe = Artifact(store, job.inputs["mixture"].path or "").json("recipe.json")
        corpora = [Artifact(store, source["path"]) for source in recipe["sources"]]
        blocks = BlockCache(job.scratch)
        self.fingerprints: list[str] = [source["fingerprint"] for source in recipe["sources"]]
        self.names = segment.source_names or [fingerprint[:8] for fingerprint in self.fingerprints]
        self.samples: CountedSamples = MixtureSamples.open(
            recipe,
            [split_shards(corpus, "train", blocks) for corpus in corpora],
            sequence_length=segment.sequence_length,
            goldfish=segment.goldfish,
        )
        self.heldout: dict[str, Sequence[SampleLike]] = {}
        if segment.validation.interval:
            heldout = validation_samples(
                recipe,
                [split_shards(corpus, "validation", blocks) for corpus in corpora],
                sequence_length=segment.sequence_length,
            )
            for index, name in enumerate(self.names):
                chosen = [heldout[i] for i in heldout.of_source(index)[: segment.validation.samples]]
                if _scored(chosen):
                    self.heldout[name] = chosen


class ConversationData:
    """Packed conversations. What is held out is scored on the assistant's tokens alone, whatever weight the others train with."""

    def __init__(self, store: Store, job: Job, segment: SftSegment) -> None:
        from apertus_model.data.chat_samples import ConversationSamples, heldout
        from apertus_model.data.conversations import ConversationShards

        inputs = [job.inputs[f"conversations:{index}"] for index in range(len(segment.repeats))]
        artifacts = [Artifact(store, source.path or "") for source in inputs]
        pad_id = artifacts[0].manifest["facts"]["pad_id"]
        self.fingerprints = [source.fingerprint for source in inputs]
        self.names = segment.source_names or [fingerprint[:8] for fingerprint in self.fingerprints]
        self.samples: CountedSamples = ConversationSamples.open(
            [ConversationShards(artifact, "train") for artifact in artifacts],
            segment.repeats,
            sequence_length=segment.sequence_length,
            seed=segment.data_seed,
            prompt_weight=segment.prompt_weight,
            longer=segment.longer,
            pad_id=pad_id,
        )
        self.heldout: dict[str, Sequence[SampleLike]] = {}
        if segment.validation.interval:
            for name, artifact in zip(self.names, artifacts, strict=True):
                rows = heldout(
                    [ConversationShards(artifact, "validation")],
                    sequence_length=segment.sequence_length,
                    longer=segment.longer,
                    pad_id=pad_id,
                )
                if _scored(rows[: segment.validation.samples]):
                    self.heldout[name] = rows[: segment.validation.samples]


class PreferenceData:
    """Packed pairs of completions with their quantile rewards and reference log-probabilities. None is held out."""

    def __init__(self, store: Store, job: Job, segment: PreferenceSegment) -> None:
        from apertus_model.data.preference_samples import PreferenceSamples

        pairs = job.inputs["pairs"]
        artifact = Artifact(store, pairs.path or "")
        self.fingerprints = [pairs.fingerprint]
        self.names = segment.source_names or ["pairs"]
        self.samples: CountedSamples = PreferenceSamples.open(
            artifact,
            Artifact(store, job.inputs["log_probabilities"].path or ""),
            sequence_length=segment.sequence_length,
            seed=segment.data_seed,
            pad_id=artifact.manifest["facts"]["pad_id"],
        )
        self.heldout: dict[str, Sequence[SampleLike]] = {}


def _scored(samples: Sequence[SampleLike]) -> bool:
    """Whether there is anything to score in them."""
    return any((sample.labels >= 0).any() for sample in samples)
