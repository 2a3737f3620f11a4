"""The registry of stage kinds: one line per kind. Everything else about a kind is found by its name."""

from __future__ import annotations

from specs.stages.base import Stage
from specs.stages.cooldown import CooldownStage
from specs.stages.corpus import CorpusStage
from specs.stages.evaluate import EvaluateStage
from specs.stages.export import ExportStage
from specs.stages.mixture import MixtureStage
from specs.stages.pretrain import PretrainStage
from specs.stages.tokenizer import TokenizerStage

STAGES: dict[str, type[Stage]] = {
    "tokenizer": TokenizerStage,
    "corpus": CorpusStage,
    "mixture": MixtureStage,
    "pretrain": PretrainStage,
    "cooldown": CooldownStage,
    "evaluate": EvaluateStage,
    "export": ExportStage,
}
