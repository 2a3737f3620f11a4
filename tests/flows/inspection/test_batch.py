"""Samples and rows: what is shown is what the model reads."""

from __future__ import annotations

import io
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from apertus_model.data.order.mixture_recipe import MixtureRecipe
from apertus_model.data.preferences.reward_samples import RewardSamples
from apertus_model.data.preferences.samples import PreferenceSamples, PreferenceSets
from flows.inspection import batch as inspect_batch
from flows.inspection.common import Options
from flows.planning.plan import Plan
from infra.store import Artifact
from specs.stages.sft import InverseRl, SftSegment
from tests.flows.inspection.looking import look


def test_a_batch_shows_what_the_trainer_would_read(built: Plan) -> None:
    from apertus_model.data.order.samples import MixtureSamples
    from apertus_model.data.tokens.stream import IGNORE_INDEX, split_shards
    from specs.settings import Goldfish

    found, text = look(built, "cooldown", step=2, limit=3)
    # 8 steps of 4 were drawn from this mixture before, in packed rows, which are other samples: the cooldown
    # begins at 0.
    assert [sample["index"] for sample in found["samples"]] == [8, 9, 10]
    recipe = Artifact(built.store, built.graph.nodes["main"].path).document("recipe.json", MixtureRecipe)
    corpora = [Artifact(built.store, source.path) for source in recipe.sources]
    shards = [split_shards(corpus, "train") for corpus in corpora]
    samples = MixtureSamples.open(recipe, shards, sequence_length=32, goldfish=Goldfish(k=3, h=2))
    masked = 0
    tokenizer = Tokenizer.from_str(
        Artifact(built.store, built.graph.nodes["tokenizer"].path).bytes("tokenizer.json").decode()
    )
    for shown in found["samples"]:
        sample = samples[shown["index"]]
        assert (shown["input"], shown["labels"], shown["positions"]) == tuple(
            array.tolist() for array in sample[:3]
        )
        assert sum(document["tokens"] for document in shown["documents"]) == 32
        assert [document["begin"] for document in shown["documents"]] == [
            t for t in range(32) if sample.positions[t] == 0
        ]
        untrained = sum(
            piece["tokens"]
            for document in shown["documents"]
            for piece in document["pieces"]
            if piece["status"] == "untrained"
        )
        inside = [t for t in range(1, 32) if sample.positions[t] > 0]
        assert untrained == sum(int(sample.labels[t - 1]) == IGNORE_INDEX for t in inside)
        masked += untrained
        pieces = [piece["text"] for document in shown["documents"] for piece in document["pieces"]]
        assert "".join(pieces) == tokenizer.decode(shown["input"], skip_special_tokens=False)
        assert max(pieces, key=len).splitlines()[0] in text
    assert masked
    assert "corpus/notes (sequence" in text


def test_packed_rows_show_their_padding_as_such(built: Plan) -> None:
    found, _ = look(built, "pretrain", step=1, limit=4)
    assert found["packing"] == "best-fit"
    for shown in found["samples"]:
        for document in shown["documents"]:
            assert (document["source"] == "padding") == all(
                piece["status"] == "padding" for piece in document["pieces"]
            )


def test_conversations_show_prompt_and_answer_apart(built: Plan) -> None:
    found, text = look(built, "sft", sample=0)
    assert found["samples"][0]["source"].startswith("chat/questions (conversation")
    for document in found["samples"][0]["documents"]:
        if document["source"] == "padding":
            continue
        trained = "".join(piece["text"] for piece in document["pieces"] if piece["status"] == "trained")
        untrained = "".join(piece["text"] for piece in document["pieces"] if piece["status"] == "untrained")
        assert trained.endswith("<|assistant_end|>")
        assert "foxes" in trained
        assert "What is note" in untrained
        assert "foxes" not in untrained
    assert "What is note" in text


def test_of_a_loss_that_reads_every_place_what_weighs_is_shown_as_trained(built: Plan) -> None:
    node = built.graph.nodes["sft"]
    assert isinstance(node.part, SftSegment)

    def shown(**loss: Any) -> Any:
        part = node.part.model_copy(update={"packing": "none", **loss})
        return inspect_batch.collect(built, replace(node, part=part), Options(sample=0))["samples"][0]

    plain, all_places = shown(), shown(inverse_rl=InverseRl())
    apart = shown(prompt_weight=0.5, length_normalised=True)
    assert [one["source"] for one in plain["documents"]][1:] == ["padding"]
    assert all_places["documents"] == plain["documents"]
    assert sum(label >= 0 for label in all_places["labels"]) > sum(label >= 0 for label in plain["labels"])
    assert all_places["counts"] == [sum(label >= 0 for label in plain["labels"])]
    assert np.array(apart["weights"]).sum(0).tolist() == [apart["counts"][0], 0.5 * apart["counts"][1]]


@pytest.fixture
def words() -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(["?", "ask", "yes", "no", "<pad>"])}
    return Tokenizer(WordLevel(vocabulary, unk_token="?"))


def test_labelled_pairs_show_both_sides(words: Tokenizer) -> None:
    arrays = {
        "tokens": np.array([1, 2, 2, 1, 3], dtype=np.int32),
        "lengths": np.array([3, 2]),
        "prompt_lengths": np.array([1, 1]),
        "margins": np.zeros(1, dtype=np.float32),
        "sources": np.zeros(1, dtype=np.int32),
    }
    rows = RewardSamples(arrays, sequence_length=8, pad_id=4)
    samples = PreferenceSets([rows], [Fraction(1)], seed=1)
    found = inspect_batch.sample_of(SimpleNamespace(samples=samples, names=["pairs"]), words, 0, {4})
    sources = [document["source"] for document in found["documents"]]
    assert sources == ["pairs (pair 0, chosen)", "pairs (pair 0, rejected)", "padding"]


def _of_pairs(words: Tokenizer, rewards: list[float]) -> inspect_batch.Sample:
    arrays = {
        "tokens": np.array([1, 2, 2, 1, 3], dtype=np.int32),
        "lengths": np.array([3, 2]),
        "prompt_lengths": np.array([1, 1]),
        "rewards": np.array(rewards, dtype=np.float32),
    }
    reference = np.array([-1.5, -2.5], dtype=np.float32)
    rows = PreferenceSamples(arrays, reference, sequence_length=8, pad_id=4)
    samples = PreferenceSets([rows], [Fraction(1)], seed=1)
    return inspect_batch.sample_of(SimpleNamespace(samples=samples, names=["pairs"]), words, 0, {4})


def test_pairs_of_a_file_have_no_rewards_to_show(words: Tokenizer) -> None:
    assert [document["source"] for document in _of_pairs(words, [0, 0])["documents"]] == [
        "pairs (chosen, reference log-probability -1.50)",
        "pairs (rejected, reference log-probability -2.50)",
        "padding",
    ]


def test_pairs_show_both_sides_with_their_rewards(words: Tokenizer) -> None:
    found = _of_pairs(words, [0.75, 0.25])
    assert [(document["source"], document["trained"]) for document in found["documents"]] == [
        ("pairs (chosen, quantile reward 0.750, reference log-probability -1.50)", 2),
        ("pairs (rejected, quantile reward 0.250, reference log-probability -2.50)", 1),
        ("padding", 0),
    ]
    assert [piece["text"] for piece in found["documents"][0]["pieces"]] == ["ask", "yes yes"]
    assert found["rewards"] == [0.75, 0.25]


def test_a_sample_that_training_never_draws_is_noted(built: Plan) -> None:
    segment = built.graph.nodes["cooldown"].part
    first, end = (
        segment.sample_offset,
        segment.sample_offset + segment.global_batch_size * (segment.end_step - segment.start_step),
    )
    assert [bool(look(built, "cooldown", sample=index)[0]["note"]) for index in (first, end - 1, end)] == [
        False,
        False,
        True,
    ]
    assert (
        f"draws the samples {first:,} to {end - 1:,} here; {end:,} is not among them"
        in look(built, "cooldown", sample=end)[1]
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_masks_are_marked_where_there_are_no_colours(built: Plan, terminal: bool) -> None:
    found, _ = look(built, "sft", sample=0)
    console = Console(width=200, file=io.StringIO(), force_terminal=terminal, color_system=None)
    inspect_batch.show(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    hidden = sum(
        piece["status"] == "untrained"
        for document in found["samples"][0]["documents"]
        for piece in document["pieces"]
    )
    assert hidden
    assert text.count("⟦") == text.count("⟧") == (0 if terminal else hidden + 1)  # and one in the legend
