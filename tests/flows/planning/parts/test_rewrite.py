"""A rewrite is planned without a copy: stages that start from it read the checkpoint, in another order of its
layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.layer_schedule import LayerPairs
from specs.recipe import load
from specs.sparse_attention import Hashed
from specs.stages.evaluate import EvaluatePart
from specs.stages.export import ExportPart
from specs.stages.rewrite import RewritePart
from specs.stages.training import Segment
from tests.flows.comparing import changed, segment
from tests.flows.conftest import finish
from tests.models import MODEL, model_folder
from tests.recipes import RECIPE, write_recipe

STAGES = """\
  deep:
    kind: pretrain
    model: {{dim: 32, n_layers: 4, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 8 steps
    optimizer: {{lr: 1e-3}}
    checkpoint: {{interval: 4}}
  rewrite: {{kind: rewrite, from: deep@step=4, matrix: {{layer_pairs.start: [0, 2]}},
    layer_pairs: {{layers: 2}}}}
  judge: {{kind: evaluate, matrix: [0, 2], from: "rewrite-${{matrix}}", sources: [corpus/notes]}}
  chosen: {{kind: select, evaluations: ["judge-*"], metric: perplexity/corpus/notes}}
  recover: {{kind: cooldown, from: rewrite-2, carry: [weights, optimizer, data], mixture: main,
    budget: 4 steps, trainable: ["layers.[23].*"]}}
  paired: {{kind: export, from: chosen}}
"""


def planned(tmp_path: Path, store: Store, *overrides: str, stages: str = STAGES) -> Plan:
    return make(load(write_recipe(tmp_path, RECIPE + stages), overrides), store)


def pairs(model: Any) -> LayerPairs:
    return cast(LayerPairs, model.layer_pairs)


def test_what_follows_reads_the_checkpoint_itself_in_the_new_order(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    nodes = plan.graph.nodes
    read = nodes["rewrite-2"].inputs["checkpoint"]
    assert (read.node, read.step) == ("deep", 4) and 4 in segment(plan, "deep").checkpoint.milestones
    assert pairs(cast(RewritePart, nodes["rewrite-2"].part).model) == LayerPairs(start=2, layers=2)
    assert nodes["judge-2"].inputs["checkpoint"] == read
    assert pairs(cast(EvaluatePart, nodes["judge-2"].part).model).start == 2
    recover = segment(plan, "recover")
    assert nodes["recover"].inputs["parent"] == read and pairs(recover.model).start == 2
    # of the same mixture, and so after the samples that the first steps have drawn
    assert (recover.sample_offset, recover.global_batch_size, recover.sequence_length) == (16, 4, 32)
    assert changed(plan, planned(tmp_path, store, "stages.rewrite-2.layer_pairs.form=swapped")) == {
        "rewrite-2", "judge-2", "chosen", "recover", "paired"
    }  # fmt: skip


def test_a_selection_among_rewrites_is_planned_again_once_it_has_chosen(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store)
    assert pairs(cast(ExportPart, plan.graph.nodes["paired"].part).model).start == 0, "the first candidate"
    finish(plan, "chosen", metrics={"chosen": 1})
    export = planned(tmp_path, store).graph.nodes["paired"]
    assert pairs(cast(ExportPart, export.part).model).start == 2
    assert export.inputs["checkpoint"].node == "deep"


def test_a_model_of_hugging_face_is_rewritten(tmp_path: Path, store: Store) -> None:
    folder = model_folder(tmp_path / "model")
    stage = f"""\
  theirs: {{{{kind: rewrite, from: "hf:{folder}", layer_pairs: {{{{start: 0, layers: {MODEL.n_layers}}}}}}}}}
  paired: {{{{kind: export, from: theirs}}}}
"""
    nodes = planned(tmp_path, store, stages=stage).graph.nodes
    assert nodes["paired"].inputs["checkpoint"].node == nodes["theirs/import"].name
    assert pairs(cast(ExportPart, nodes["paired"].part).model).layers == MODEL.n_layers


SPARSE = """\
  few: {{kind: rewrite, from: pretrain, attention: {{sparse: hash, buckets: 4}}}}
  trained: {{kind: cooldown, from: few, carry: [weights, optimizer], mixture: main, budget: 4 steps}}
  all: {{kind: rewrite, from: trained, attention: full}}
  last: {{kind: cooldown, from: all, carry: [weights], mixture: main, budget: 4 steps}}
  folder: {{kind: export, from: last}}
"""


def test_attention_becomes_sparse_and_full_again_before_an_export(tmp_path: Path, store: Store) -> None:
    plan = planned(tmp_path, store, stages=SPARSE)
    nodes = plan.graph.nodes
    plain = cast(Segment, nodes["cooldown"].part).model
    assert segment(plan, "trained").model == plain.model_copy(
        update={"attention": Hashed(sparse="hash", buckets=4)}
    )
    assert nodes["last"].inputs["parent"].node == "trained" and segment(plan, "last").model == plain
    assert cast(ExportPart, nodes["folder"].part).model == plain
    with pytest.raises(SpecError, match="'pretrain' is computed in that way already"):
        planned(tmp_path, store, "stages.few.attention=full", stages=SPARSE)
    with pytest.raises(SpecError, match="changes one thing; set layer_pairs or attention"):
        planned(tmp_path, store, "stages.few.layer_pairs={start: 0, layers: 2}", stages=SPARSE)
    with pytest.raises(SpecError, match="its attention is sparse"):
        planned(tmp_path, store, "stages.folder.from=trained", stages=SPARSE)
    with pytest.raises(SpecError, match="'pretrain': with repeats, layers read the keys of earlier passes"):
        planned(
            tmp_path, store, "stages.pretrain.model.repeats={start: 0, layers: 1, times: 2}", stages=SPARSE
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.rewrite.layer_pairs.layers=4", "stages.rewrite-2.layer_pairs: the range ends with layer 5"),
        ("stages.deep.model.depth_average={}", "have another order already: depth_average"),
        ("stages.recover.launch={processes: 2, parallel: {pp: 2}}", "model.layer_pairs runs two layers"),
        ("stages.recover.from=rewrite-2@step=4", "'rewrite-2@step=4' is outside stage 'rewrite-2'"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(
    tmp_path: Path, store: Store, override: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, store, override)
    assert message in str(caught.value)
