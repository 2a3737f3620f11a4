"""A rewritten checkpoint: what the stage states, and the export with the weights of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apertus_model.stages import export
from infra.store import Artifact
from specs.layer_schedule import LayerPairs
from specs.stages.rewrite import RewritePart
from tests.apertus_model.stages.test_export import EXPORT
from tests.apertus_model.stages.training import SPEC, Stages, weights_of

PAIRED = SPEC.model.model_copy(update={"layer_pairs": LayerPairs(start=0, layers=2)})


def test_a_rewrite_states_its_layers_and_steps(stages: Stages) -> None:
    part = RewritePart(model=PAIRED)
    manifest = stages.run("rewrite", "paired", part).manifest
    assert manifest.metrics == {"layers": SPEC.model.n_layers, "steps": SPEC.model.n_layers - 1}


def test_the_export_has_the_weights_of_the_checkpoint_and_the_logits_of_the_pairs(
    stages: Stages, trained: Artifact
) -> None:
    """Whole, with a key-value cache, and a layer at a time; the class of Apertus refuses the folder."""
    from transformers import ApertusForCausalLM

    part = EXPORT.model_copy(update={"model": PAIRED})
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    exported = stages.run("export", "paired", part, inputs=inputs)
    folder = Path(stages.store.full(exported.stored_name("config.json"))).parent
    checkpoint = trained.checkpoint(6)
    assert exported.json("config.json")["layer_schedule"] == [[0, [], [1]]]
    assert exported.manifest.metrics["logit_difference"] < 1e-5
    assert export.compare_by_layer(checkpoint, folder, part) < 1e-5
    own = export.load_model(part, checkpoint)
    assert own.tok_embeddings.weight.flatten().tolist() == weights_of(trained, 6)["tok_embeddings.weight"]
    theirs = export.auto_class(PAIRED).from_pretrained(folder).eval()
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = own(tokens)
        assert (export.by_cache(theirs, tokens, steps=7) - expected).abs().max() < 1e-5
        plain = export.load_model(EXPORT, checkpoint)
        assert (plain(tokens) - expected).abs().max() > 1e-4, "another function of the same weights"
    with pytest.raises(KeyError, match="xielu_in_a_layer_schedule"):
        ApertusForCausalLM.from_pretrained(folder)
