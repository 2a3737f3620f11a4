"""Planted documents in a plan: what cannot be made or measured is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.recipes import CHAT, write_recipe

PLANTED = """\
  planted: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{planted: {{
    codes: {{canaries: {{template: "{{number}}: {{secret}}", length: 2, count: 6}}, buckets: [0, 4]}},
    poison: {{documents: notes, buckets: [2]}}}}}}}}}}
  exposed: {{kind: evaluate, from: cooldown,
    memorisation: {{probes: planted, planted: codes, exposure: {{}}}}}}
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.planted.sources.notes.planted.poison.documents=note",
            r"poison\.documents: there is no source 'note' under sources:\. Fix: did you mean 'notes'",
        ),
        (
            "stages.planted.sources.notes.planted.poison.documents=questions",
            "source 'questions' has format chat; what is planted is text",
        ),
        (
            "stages.planted.sources.notes.planted.codes.buckets=[0, -4]",
            r"planted\.codes\.buckets\[1\]: -4 is below 0",
        ),
        (
            "stages.planted.sources.notes.planted.codes.canaries.template=no slot",
            r"planted\.codes\.canaries: the template has 0 slots \{secret\}; set one",
        ),
        (
            "stages.planted.sources.notes.planted.codes.canaries.count=101",
            "101 different secrets are asked for, and 10 characters give 100 of length 2",
        ),
        (
            "stages.exposed.memorisation.planted=code",
            r"exposed\.memorisation\.planted: 'planted' plants no 'code'\. Fix: did you mean 'codes'\?",
        ),
        (
            "stages.exposed.memorisation.planted=poison",
            r"exposed\.memorisation\.exposure: only canaries have known alternatives",
        ),
        (
            "stages.exposed.memorisation={probes: planted}",
            r"\.probes: 'planted' has no repeats:, so it has no probes\. Fix: .* or set planted",
        ),
        (
            "stages.exposed.gates=[{metric: memorisation/exposure/8, max: 3}]",
            "'exposed' will not have a metric 'memorisation/exposure/8'",
        ),
    ],
)
def test_planted_documents_that_cannot_be_made_or_measured_are_refused(
    tmp_path: Path, store: Store, override: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make(load(write_recipe(tmp_path, CHAT + PLANTED), [override]), store)


def test_planted_texts_are_an_input_by_their_content(tmp_path: Path, store: Store) -> None:
    path = write_recipe(tmp_path, CHAT + PLANTED)
    gate = "stages.exposed.gates=[{metric: memorisation/exposure/4, max: 3}]"
    plan = make(load(path, [gate]), store)
    corpus = plan.graph.nodes["planted/notes"]
    assert corpus.inputs["planted:poison"].fingerprint == corpus.inputs["documents"].fingerprint
    estimate = plan.estimates.inference["exposed"].to_json()["parts"][-1]
    assert estimate["requests"] == 6 * 100  # canaries, each among all secrets
    codes = "stages.planted.sources.notes.planted.codes"
    for override in (f"{codes}.buckets=[0, 5]", f"{codes}.canaries.seed=1", f"{codes}.seed=1"):
        assert (
            make(load(path, [override]), store).graph.nodes["planted/notes"].fingerprint != corpus.fingerprint
        )
    bare = plan.graph.nodes["corpus/notes"].identity
    assert "planted" not in bare and "planted" not in bare["process"]
