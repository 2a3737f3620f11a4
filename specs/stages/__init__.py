"""The registry of stage kinds: one line per kind. Everything else about a kind is found by its name."""

from __future__ import annotations

from specs.stages.base import Stage
from specs.stages.conversations import ConversationsStage
from specs.stages.cooldown import CooldownStage
from specs.stages.corpus import CorpusStage
from specs.stages.dpo import DpoStage
from specs.stages.evaluate import EvaluateStage
from specs.stages.export import ExportStage
from specs.stages.long_context import LongContextStage
from specs.stages.merge import MergeStage
from specs.stages.mixture import MixtureStage
from specs.stages.preference_data import PreferenceDataStage
from specs.stages.pretrain import PretrainStage
from specs.stages.probe import ProbeStage
from specs.stages.qrpo import QrpoStage
from specs.stages.select import SelectStage
from specs.stages.sft import SftStage
from specs.stages.tokenizer import TokenizerStage

STAGES: dict[str, type[Stage]] = {
    "tokenizer": TokenizerStage,
    "corpus": CorpusStage,
    "mixture": MixtureStage,
    "pretrain": PretrainStage,
    "cooldown": CooldownStage,
    "long_context": LongContextStage,
    "conversations": ConversationsStage,
    "sft": SftStage,
    "preference_data": PreferenceDataStage,
    "qrpo": QrpoStage,
    "dpo": DpoStage,
    "merge": MergeStage,
    "select": SelectStage,
    "evaluate": EvaluateStage,
    "probe": ProbeStage,
    "export": ExportStage,
}
