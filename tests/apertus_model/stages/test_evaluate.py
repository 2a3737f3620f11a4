"""Evaluations score each source and each bucket."""

import math

import numpy as np
import pytest

from apertus_model.data.conversations.stored import SHARD_SUFFIXES, Conversation
from apertus_model.data.rows import write_rows
from apertus_model.data.tokens.megatron import TokenFileWriter
from infra.store import Artifact
from specs.planted import Canaries
from specs.stages.evaluate import EvaluatePart
from specs.stages.memorisation import Memorisation
from tests.apertus_model.stages.training import BOS, EOS, PAD, PROBE, SPEC, Stages

MEMORISATION = Memorisation.model_validate(
    {"probes": "corpus/steady", "prefixes": [8, 16], "suffix": 8, "nucleus": {}}
)
EVALUATION = EvaluatePart(
    model=SPEC.model,
    sequence_length=16,
    samples=3,
    memorisation=MEMORISATION,
    source_names=["steady", "striding"],
    batch_size=2,
)


def continued(stages: Stages, name: str) -> None:
    """An artifact in which the two long probes are continued as they go on, and by something else."""
    attempt = stages.attempt("continuations", name)
    rows = [
        {"probe": probe, "prefix": prefix, "offset": 0, "tokens": tokens}
        for prefix in MEMORISATION.prefixes
        for probe, tokens in enumerate([PROBE[prefix : prefix + 8], [3] * 8])
    ]
    attempt.commit(metrics={}, facts=write_rows(attempt, "continuations", rows))


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_scores_each_source_and_each_bucket(
    stages: Stages, trained: Artifact, processes: int
) -> None:
    inputs = {
        "checkpoint": stages.ref("pretrain/trained", 6),
        "source:0": stages.ref("corpus/steady"),
        "source:1": stages.ref("corpus/striding"),
        "probes": stages.ref("corpus/steady"),
    }
    for decoding in MEMORISATION.decodings:
        continued(stages, f"{decoding}-{processes}")
        inputs[f"continuations:{decoding}"] = stages.ref(f"continuations/{decoding}-{processes}")
    name = f"evaluation-{processes}"
    metrics = stages.run("evaluate", name, EVALUATION, inputs=inputs, processes=processes).manifest.metrics
    assert {key for key in metrics if key.startswith("perplexity")} == {
        "perplexity", "perplexity/steady", "perplexity/striding"
    }  # fmt: skip
    names = MEMORISATION.metrics([0, 8])
    assert {key for key in metrics if key.startswith("memorisation")} == set(names)
    assert [metrics[f"memorisation/greedy/prefix-16/offset-0/exact/{bucket}"] for bucket in (0, 8)] == [1, 0]
    for name in names:
        if f"{name}/low" in metrics:
            assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"]
    low, high = sorted((metrics["perplexity/steady"], metrics["perplexity/striding"]))
    assert low <= metrics["perplexity"] <= high
    assert all(math.isfinite(value) for value in metrics.values())
    if processes == 2:
        alone = Artifact(stages.store, "evaluate/evaluation-1").manifest.metrics
        assert metrics == pytest.approx(alone, rel=1e-5)


DOCUMENTS = [[BOS, *range(20 + first, 34 + first), EOS] for first in (0, 7)]  # each fills a row


def held_out(stages: Stages, kind: str, name: str, answers: slice = slice(1, None)) -> None:
    """The documents as the held-out split of a corpus, or as conversations with the answers at these
    places."""
    attempt, shard = stages.attempt(kind, name), "validation-00000"
    mask = np.zeros(len(DOCUMENTS[0]), np.uint8)
    mask[answers] = 1
    with TokenFileWriter(attempt.workdir / shard, np.uint16) as writer:
        for document in DOCUMENTS:
            writer.write(document)
    np.save(attempt.workdir / f"{shard}.mask.npy", np.tile(mask, len(DOCUMENTS)))
    (attempt.workdir / f"{shard}.jsonl").write_text(f"{Conversation('', []).to_json()}\n" * len(DOCUMENTS))
    for suffix in SHARD_SUFFIXES:
        attempt.put(attempt.workdir / f"{shard}{suffix}", f"{shard}{suffix}")
    ids = {"vocab_size": 128, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD}
    attempt.commit(metrics={}, facts={**ids, "train": [], "validation": [shard]})


def test_conversations_are_scored_by_the_tokens_of_their_answers(stages: Stages, trained: Artifact) -> None:
    """As documents, which have the same labels, these conversations have the same loss; and what is no answer
    has the rest of it."""
    answers = {"whole": slice(1, None), "openings": slice(1, 10), "ends": slice(10, None)}
    held_out(stages, "corpus", "documents")
    for name, places in answers.items():
        held_out(stages, "conversations", name, places)
    sources = ["corpus/documents", *(f"conversations/{name}" for name in answers)]
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6)}
    inputs |= {f"source:{index}": stages.ref(source) for index, source in enumerate(sources)}
    spec = EVALUATION.model_copy(update={"memorisation": None, "source_names": sources})
    metrics = stages.run("evaluate", "conversations", spec, inputs=inputs).manifest.metrics
    documents, whole, openings, ends = (math.log(metrics[f"perplexity/{source}"]) for source in sources)
    assert whole == pytest.approx(documents, rel=1e-6)
    assert openings != pytest.approx(ends, rel=1e-4)
    assert 9 * openings + 6 * ends == pytest.approx(15 * whole, rel=1e-6)


def test_the_exposure_of_planted_canaries_is_the_same_on_any_number_of_processes(
    stages: Stages, trained: Artifact
) -> None:
    spec = EVALUATION.model_copy(
        update={
            "memorisation": Memorisation.model_validate(
                {"probes": "corpus/steady", "planted": "codes", "prefixes": [2], "suffix": 2, "exposure": {}}
            ),
            "canaries": Canaries(template="t5 t{number} t6{secret}", length=1, count=2),
            "source_names": [],
        }
    )
    attempt = stages.attempt("continuations", "codes")
    answers = [{"probe": number, "prefix": 2, "offset": 0, "tokens": [1, 63]} for number in range(2)]
    attempt.commit(metrics={}, facts=write_rows(attempt, "continuations", answers))
    inputs = {
        "checkpoint": stages.ref("pretrain/trained", 6),
        "tokenizer": stages.ref("tokenizer/tokenizer"),
        "probes": stages.ref("corpus/steady"),
        "continuations:greedy": stages.ref("continuations/codes"),
    }
    found = []
    for processes in (1, 2):
        evaluated = stages.run("evaluate", f"exposed-{processes}", spec, inputs=inputs, processes=processes)
        found.append(evaluated.manifest.metrics)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert spec.memorisation is not None
    names = {f"memorisation/exposure/{bucket}" for bucket in (0, 8)}
    assert names <= set(found[0]) == set(spec.memorisation.metrics([0, 8]))
    ranks = {2 ** (math.log2(10) - found[0][name]) for name in names}  # among ten secrets
    assert all(rank == pytest.approx(round(rank)) and 1 <= round(rank) <= 10 for rank in ranks)
    # the tokens of the planted documents are the truth: 1, 63 and 2, 64
    scored = [found[0][f"memorisation/greedy/prefix-2/offset-0/rouge_l/{bucket}"] for bucket in (0, 8)]
    assert scored == [1, 0]
