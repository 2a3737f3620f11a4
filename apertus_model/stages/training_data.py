"""The training data of a segment, opened from its inputs: windows of a mixture, packed conversations, or
packed pairs of completions, with a reference or with labels.

Invariants: every kind of data is a `TrainingData`; the segment names which. `identity`
states by content all that sample i depends on: two segments with equal identities see the same samples in
the same order. It is stored with every checkpoint, and `same_data` refuses to continue with other data.
torch is not imported here, so that data can be inspected without it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from apertus_model.data.order.mixture_recipe import FILE, MixtureRecipe
from apertus_model.data.order.samples import EqualSamples, MixtureSamples, ValidationSamples
from apertus_model.data.tokens.best_fit import packed_tables
from apertus_model.data.tokens.stream import split_shards
from apertus_model.data.tokens.teacher_tokens import StoredPredictions, TaughtSamples
from infra.store import Artifact, Store
from infra.store.reading.ranges import BlockCache
from specs.base import canonical_json, flatten
from specs.differences import changes
from specs.errors import StageError, some_of
from specs.job import InputRef
from specs.settings import Goldfish
from specs.stages.distill import TeacherTokensPart
from specs.stages.mixture import exact
from specs.stages.preference_training import PreferenceSegment
from specs.stages.reward_model import RewardSegment
from specs.stages.sft import SftLoss, SftSegment
from specs.stages.training import Segment

if TYPE_CHECKING:
    from apertus_model.trainer.loader import SampleLike

Inputs = Mapping[str, InputRef]


class OtherDataError(StageError):
    """A checkpoint and its segment have different data."""


class CountedSamples(Protocol):
    """Training samples that count their passes over each source."""

    def __getitem__(self, index: int, /) -> SampleLike: ...

    def epochs(self, n: int, /) -> list[float]:
        """Passes over each source after n samples."""


class TrainingData:
    """The data of a segment. `names` and `fingerprints` of its sources have the order of `samples.epochs`."""

    samples: CountedSamples  # the training samples
    identity: dict[str, Any]  # JSON values that determine the samples

    def __init__(self, fingerprints: list[str], names: list[str]) -> None:
        self.fingerprints = fingerprints
        self.names = names or [fingerprint[:8] for fingerprint in fingerprints]
        self.heldout: dict[str, Sequence[SampleLike]] = {}

    def _hold_out(self, name: str, samples: Sequence[SampleLike]) -> None:
        """Adds the held-out sequences of a source, if any label is scored."""
        if any((sample.labels >= 0).any() for sample in samples):
            self.heldout[name] = samples


def open_data(store: Store, inputs: Inputs, segment: Segment) -> TrainingData:
    """The data of a segment, from its inputs by role."""
    module, _, name = segment.data_class.rpartition(":")
    return getattr(importlib.import_module(module or __name__), name)(store, inputs, segment)


def same_data(now: Mapping[str, Any], then: Mapping[str, Any], step: int) -> None:
    """Raises OtherDataError, with the differences, when a checkpoint's data are not the current ones."""
    differing = changes(flatten(dict(then)), flatten(dict(now)))
    if differing:
        differences = (f"{change.name}: {_or_none(change.a)} -> {_or_none(change.b)}" for change in differing)
        raise OtherDataError(
            f"the checkpoint of step {step} was trained on other data: {some_of(differences, 4, '; ')}. Fix:"
            " restore those data, or delete the artifact of this stage to train it again"
        )


def _or_none(value: Any) -> Any:
    return "none" if value is None else value


def _content(artifact: Artifact) -> str:
    """The digest of the manifest entries of an artifact's files, without tables about the documents."""
    files = artifact.manifest.files
    names = sorted(name for name in files if not name.endswith(".parquet"))
    document = [[name, files[name].size, files[name].sha256] for name in names]
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()[:16]


class Mixture(NamedTuple):
    """An opened mixture."""

    recipe: MixtureRecipe
    corpora: list[Artifact]
    samples: MixtureSamples


def open_mixture(
    store: Store,
    inputs: Inputs,
    part: Segment | TeacherTokensPart,
    blocks: BlockCache | None = None,
    goldfish: Goldfish | None = None,
) -> Mixture:
    """The training samples of a part over a mixture. `blocks` caches pieces of corpora in a remote store."""
    blocks = blocks or BlockCache()
    recipe = _recipe(store, inputs["mixture"])
    corpora = [Artifact(store, source.path) for source in recipe.sources]
    packed = [
        Artifact.of_input(store, inputs[f"packed:{index}"])
        for index in range(len(corpora) if part.packing == "best-fit" else 0)
    ]
    samples = MixtureSamples.open(
        recipe,
        [split_shards(corpus, "train", blocks) for corpus in corpora],
        sequence_length=part.sequence_length,
        goldfish=goldfish,
        packed=[packed_tables(artifact) for artifact in packed] or None,
        excluded=[
            (_recipe(store, inputs[f"excluded:{index}"]), drawn) for index, drawn in enumerate(part.excluded)
        ],
    )
    return Mixture(recipe, corpora, samples)


class MixtureData(TrainingData):
    """Windows, or packed rows, over the documents of a mixture."""

    def __init__(self, store: Store, inputs: Inputs, segment: Segment) -> None:
        self.blocks = blocks = BlockCache()
        recipe, corpora, samples = open_mixture(store, inputs, segment, blocks, segment.goldfish)
        super().__init__([source.fingerprint for source in recipe.sources], segment.source_names)
        self.samples = samples
        self.identity = {
            "sequence_length": segment.sequence_length,
            "packing": segment.packing,
            "goldfish": segment.goldfish.model_dump() if segment.goldfish else None,
            "seed": recipe.seed,
            "sources": {
                source.fingerprint: {
                    "weight": source.weight,
                    "sequences": samples.order.windows[index],
                    "drawn_before": samples.order.starts[index],
                    "content": _content(corpora[index]),
                }
                for index, source in enumerate(recipe.sources)
            },
        }
        if segment.validation.interval:
            shards = {
                name: split_shards(corpus, "validation", blocks)
                for name, corpus in zip(self.names, corpora, strict=True)
            }
            names = [name for name in self.names if shards[name]]  # the others hold out nothing
            heldout = ValidationSamples(
                [shards[name] for name in names],
                eos_id=recipe.eos_id,
                sequence_length=segment.sequence_length,
            )
            for index, name in enumerate(names):
                places = heldout.of_source(index)[: segment.validation.samples]
                self._hold_out(name, [heldout[place] for place in places])


class EqualMixtureData(MixtureData):
    """Equally many samples of each source of a mixture in every batch."""

    def __init__(self, store: Store, inputs: Inputs, segment: Segment) -> None:
        super().__init__(store, inputs, segment)
        self.samples = EqualSamples(cast(MixtureSamples, self.samples), segment.global_batch_size)
        self.identity["batches"] = "equal"


class TaughtMixtureData(MixtureData):
    """Samples of a mixture with the stored predictions of a teacher."""

    def __init__(self, store: Store, inputs: Inputs, segment: Segment) -> None:
        super().__init__(store, inputs, segment)
        predictions = Artifact.of_input(store, inputs["teacher"])
        samples = cast(MixtureSamples, self.samples)
        self.samples = TaughtSamples(samples, StoredPredictions(predictions, self.blocks))
        self.identity["teacher"] = _content(predictions)


def _recipe(store: Store, mixture: InputRef) -> MixtureRecipe:
    return Artifact.of_input(store, mixture).document(FILE, MixtureRecipe)


class ConversationData(TrainingData):
    """Conversations. Held-out ones are packed, and scored on the assistant's tokens whatever the loss."""

    def __init__(self, store: Store, inputs: Inputs, segment: SftSegment) -> None:
        from apertus_model.data.conversations.samples import ConversationSamples, heldout
        from apertus_model.data.conversations.stored import ConversationShards

        sources = [inputs[f"conversations:{index}"] for index in range(len(segment.repeats))]
        artifacts = [Artifact.of_input(store, source) for source in sources]
        pad_id = artifacts[0].manifest.facts["pad_id"]
        super().__init__([source.fingerprint for source in sources], segment.source_names)
        self.samples = ConversationSamples(
            [ConversationShards(artifact, "train") for artifact in artifacts],
            segment.repeats,
            sequence_length=segment.sequence_length,
            seed=segment.data_seed,
            loss=segment,
            packing=segment.packing,
            longer=segment.longer,
            pad_id=pad_id,
        )
        self.identity = {
            "sequence_length": segment.sequence_length,
            "seed": segment.data_seed,
            "loss": {name: segment.to_json()[name] for name in SftLoss.model_fields},
            "packing": segment.packing,
            "longer": segment.longer,
            "sources": {
                source.fingerprint: {"repeats": repeats, "content": _content(artifact)}
                for source, repeats, artifact in zip(sources, segment.repeats, artifacts, strict=True)
            },
        }
        if segment.validation.interval:
            for name, artifact in zip(self.names, artifacts, strict=True):
                rows = heldout(
                    [ConversationShards(artifact, "validation")],
                    sequence_length=segment.sequence_length,
                    longer=segment.longer,
                    pad_id=pad_id,
                )
                self._hold_out(name, rows[: segment.validation.samples])


def sides_of(pairs: InputRef) -> int:
    """The number of completions of an input that belong together: 2 for pairs, 1 for single completions."""
    return 1 if pairs.kind == "rewarded_completions" else 2


class PreferenceData(TrainingData):
    """Packed pairs of completions with their quantile rewards and reference log-probabilities, from one or
    several sets, without held-out pairs."""

    def __init__(self, store: Store, inputs: Inputs, segment: PreferenceSegment) -> None:
        from apertus_model.data.preferences.samples import PreferenceSamples, PreferenceSets
        from apertus_model.data.tokens.packing import load_array

        several = len(segment.repeats) > 1
        suffixes = [f":{number}" for number in range(len(segment.repeats))] if several else [""]
        names = segment.source_names or [f"pairs{suffix}" for suffix in suffixes]
        super().__init__([inputs[f"pairs{suffix}"].fingerprint for suffix in suffixes], names)
        self.identity = {
            "sequence_length": segment.sequence_length,
            "seed": segment.data_seed,
            "sources": {},
        }
        sets = []
        for suffix, fingerprint in zip(suffixes, self.fingerprints, strict=True):
            pairs, reference = (
                Artifact.of_input(store, inputs[f"{role}{suffix}"]) for role in ("pairs", "log_probabilities")
            )
            content = {"content": _content(pairs), "log_probabilities": _content(reference)}
            self.identity["sources"][fingerprint] = content
            length, pad_id = segment.sequence_length, pairs.manifest.facts["pad_id"]
            sides = sides_of(inputs[f"pairs{suffix}"])
            sets.append(
                PreferenceSamples.open(pairs, reference, sequence_length=length, pad_id=pad_id, sides=sides)
            )
        if segment.repeats != [1]:
            self.identity |= {"sets": self.fingerprints, "repeats": segment.repeats}
        if several:
            distinct = Artifact.of_input(store, inputs["distinct_prompts"])
            self.identity["distinct_prompts"] = _content(distinct)
            for number, samples in enumerate(sets):
                samples.keep(load_array(distinct.local(f"kept-{number}.npy")))
        repeats = [exact(number) for number in segment.repeats]
        self.samples = PreferenceSets(sets, repeats, seed=segment.data_seed)


class RewardData(TrainingData):
    """Packed labelled pairs. The held-out pairs are those of the conversations' held-out split, by source.

    Raises StageError when the segment ends after more passes than the stage allows."""

    def __init__(self, store: Store, inputs: Inputs, segment: RewardSegment) -> None:
        from apertus_model.data.preferences.reward_samples import RewardSamples
        from apertus_model.data.preferences.samples import PreferenceSets

        pairs = inputs["pairs"]
        artifact = Artifact.of_input(store, pairs)
        super().__init__([pairs.fingerprint], ["pairs"])
        rows = RewardSamples.open(artifact, "train", sequence_length=segment.sequence_length)
        self.samples = samples = PreferenceSets([rows], [Fraction(1)], seed=segment.data_seed)
        (passes,) = samples.epochs(segment.sample_at(segment.end_step))
        whole = int(samples.rows * segment.max_repetition)
        if passes > segment.max_repetition:
            raise StageError(
                f"the budget is {passes:.2f} passes over {samples.rows:,} sequences of pairs, and"
                f" max_repetition is {segment.max_repetition:g}. Fix: set budget: {whole} samples"
                f" ({whole // segment.global_batch_size} steps) or less, or a larger max_repetition"
            )
        self.identity = {
            "sequence_length": segment.sequence_length,
            "seed": segment.data_seed,
            "sources": {pairs.fingerprint: {"content": _content(artifact)}},
        }
        if segment.validation.interval:
            heldout = RewardSamples.open(artifact, "validation", sequence_length=segment.sequence_length)
            for number, name in enumerate(segment.source_names):
                own = heldout.of_source(number)
                if own.rows:
                    self.heldout[name] = [
                        own.row(row) for row in range(min(own.rows, segment.validation.samples))
                    ]
