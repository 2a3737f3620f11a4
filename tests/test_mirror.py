"""The test of a module is found by its name: `flows/report/history.py` is tested in
`tests/flows/report/test_history.py`. What spans modules is named by its behaviour and is in the folder that
covers it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from specs.stages import STAGES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specs", "apertus_model", "flows", "infra")
TYPES = "types only"
# They start a program, and import nothing of it.
PROGRAMS = ("tests/e2e", "tests/apertus_model/rehearsal/test_counts.py")
TESTED_IN = {
    "apertus_model.work.messages": "tests/apertus_model/work/test_worker.py",
    "flows.execution.deployments": "tests/e2e/test_deployment.py",
    "flows.inspection.training_rows": "tests/flows/cli/commands/test_metrics.py",
    "flows.planning.estimate.alignment": "tests/apertus_model/trainer/test_flop_model.py",
    "infra.kubernetes": "tests/infra/launchers/test_kubernetes.py",
    "specs.anomalies": "tests/apertus_model/trainer/test_anomalies.py",
    "specs.filter_bases": "tests/specs/test_filters.py",
    "specs.cluster": "tests/flows/planning/estimate/test_time_and_cost.py",
    "specs.hugging_face_files": "tests/infra/store/test_hugging_face.py",
    "specs.job": "tests/infra/launchers/test_kubernetes.py",
    "specs.tokenizer_comparison": "tests/flows/report/test_tokenizer_charts.py",
    "specs.trajectory": "tests/specs/test_resolution.py",
    "specs.tracking": "tests/apertus_model/test_tracking.py",
    "specs.stages.rewrite": "tests/flows/planning/parts/test_rewrite.py",
    "specs.stages.base": "tests/specs/stages/test_mixture.py",
    "specs.stages.cooldown": TYPES,
    "specs.stages.export": TYPES,
    "specs.stages.import_model": TYPES,
    "specs.stages.model_folder": TYPES,
    "specs.stages.packing": TYPES,
    "specs.stages.preference_training": "tests/specs/test_layout.py",
    "specs.stages.probe": TYPES,
    "specs.stages.qrpo": TYPES,
    "apertus_model.data.packed_pairs": "tests/apertus_model/data/test_preference_samples.py",
    "apertus_model.data.mixture_recipe": "tests/apertus_model/data/test_samples.py",
    "apertus_model.data.sequence_writer": "tests/apertus_model/stages/test_labelled_pairs.py",
    "apertus_model.generation": "tests/apertus_model/stages/test_completions.py",
    "apertus_model.vllm_client": "tests/apertus_model/stages/test_completions.py",
    "apertus_model.model_card": "tests/apertus_model/stages/test_export.py",
    "apertus_model.data.conversation_selection": "tests/apertus_model/stages/test_conversation_filters.py",
    "apertus_model.data.conversation_splits": "tests/apertus_model/stages/test_conversations.py",
    "apertus_model.data.conversation_tasks": "tests/apertus_model/stages/test_conversation_filters.py",
    "apertus_model.classifiers.stored": "tests/apertus_model/stages/test_classifier.py",
    "apertus_model.data.corpus_work": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.corpus_plan": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.probes": "tests/apertus_model/data/test_data_formats.py",
    "apertus_model.data.records": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.verdicts": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.scatter": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.teacher_tokens": "tests/apertus_model/stages/test_teacher_tokens.py",
    "apertus_model.data.span": "tests/apertus_model/data/test_corpus_passes.py",
    "apertus_model.data.found": "tests/apertus_model/data/test_documents.py",
    "apertus_model.evaluation.perplexity": "tests/apertus_model/stages/test_evaluate.py",
    "apertus_model.model.modeling_apertus_hybrid": "tests/apertus_model/model/test_hf_classes.py",
    "apertus_model.model.modeling_apertus_reward": "tests/apertus_model/stages/test_export.py",
    "apertus_model.model.modeling_apertus_scheduled": "tests/apertus_model/model/test_hf_classes.py",
    "apertus_model.model.sharding": "tests/apertus_model/trainer/test_layouts.py",
    "apertus_model.rehearsal.__main__": "tests/apertus_model/rehearsal/test_counts.py",
    "apertus_model.rehearsal.fake_cuda": "tests/apertus_model/rehearsal/test_patches.py",
    "apertus_model.rehearsal.peers": "tests/apertus_model/rehearsal/test_counts.py",
    "apertus_model.rehearsal.rates": "tests/apertus_model/rehearsal/test_patches.py",
    "apertus_model.rehearsal.records": "tests/apertus_model/rehearsal/test_counts.py",
    "apertus_model.rehearsal.rows": "tests/apertus_model/rehearsal/test_counts.py",
    "apertus_model.rehearsal.step": "tests/apertus_model/rehearsal/test_counts.py",
    "apertus_model.rewards.base": "tests/apertus_model/rewards/test_text.py",
    "apertus_model.server_client": "tests/apertus_model/test_completion_server.py",
    "apertus_model.stages.log_probabilities": "tests/apertus_model/stages/test_training_kinds.py",
    "apertus_model.stages.merge": "tests/apertus_model/stages/test_training_kinds.py",
    "apertus_model.stages.packing": "tests/flows/inspection/test_batch.py",
    "apertus_model.stages.probe": "tests/e2e/test_experiments.py",
    "apertus_model.stages.server": "tests/infra/launchers/test_warm.py",
    "apertus_model.trainer.merging": "tests/apertus_model/stages/test_training_kinds.py",
    "apertus_model.trainer.checkpoint_format": "tests/apertus_model/trainer/test_checkpoint_reader.py",
    "apertus_model.trainer.lifecycle": "tests/apertus_model/trainer/test_trainer.py",
    "apertus_model.trainer.metrics": "tests/apertus_model/trainer/test_trainer.py",
    "apertus_model.trainer.process": "tests/apertus_model/stages/test_train.py",
    "flows.terminal": "tests/flows/cli/test_tables.py",
    "flows.cli.commands.rehearse": "tests/flows/execution/test_rehearsal.py",
    "flows.execution.watchdog": "tests/e2e/test_deployment.py",
    "flows.inspection.common": "tests/flows/inspection/test_inspectors.py",
    "flows.planning.advice.given": "tests/flows/planning/advice/test_training.py",
    "flows.provenance.picture": "tests/flows/provenance/test_lineage.py",
    "flows.report.figures": "tests/flows/report/test_result_charts.py",
    "flows.report.run_data": "tests/flows/report/test_content.py",
    "infra.store.records": "tests/infra/store/files/test_integrity.py",
}
"""Modules whose tests have another name: what they do shows in another module, or in a whole stage."""
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}


def mirror(module: str) -> Path:
    *folders, name = module.split(".")
    return ROOT.joinpath("tests", *folders, f"test_{name.strip('_')}.py")


@cache
def named_in(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, or starts as programs."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^(?:\w+\.)+\w+$", node.value))
    return frozenset(found)


def file_of(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def reached(test: Path) -> Iterator[str]:
    """What a test names, with the helpers and fixtures that it has from elsewhere; and what these modules
    name."""
    fixtures = [folder / "conftest.py" for folder in test.parents if ROOT / "tests" in folder.parents]
    files = [test, *(path for path in fixtures if path.exists())]
    for path in files:
        files += [
            helper
            for name in named_in(path)
            if name.startswith("tests.") and (helper := file_of(name)) is not None and helper not in files
        ]
    direct = {name for path in files for name in named_in(path)}
    yield from direct
    for name in direct:
        if name.startswith(PACKAGES) and (path := file_of(name)) is not None:
            yield from named_in(path)


def decides(path: Path) -> bool:
    """Whether a module does more than to declare: a branch, a loop, an error."""
    kinds = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Raise, ast.comprehension, ast.BoolOp)
    return any(isinstance(node, kinds) for node in ast.walk(ast.parse(path.read_text())))


def test_every_module_has_its_test_by_its_name_or_in_the_table() -> None:
    lost = [name for name in MODULES if name not in TESTED_IN and not mirror(name).exists()]
    assert lost == [], f"add {mirror(lost[0]).relative_to(ROOT)}, or say in TESTED_IN where it is tested"


@pytest.mark.parametrize("module", TESTED_IN)
def test_an_entry_of_the_table_is_needed_and_true(module: str) -> None:
    assert module in MODULES, "there is no such module"
    assert not mirror(module).exists(), "it has a test of its name"
    test = TESTED_IN[module]
    if test == TYPES:
        assert not decides(MODULES[module]), "it has behaviour"
        return
    assert (ROOT / test).is_file()
    assert test.startswith(PROGRAMS) or module in set(reached(ROOT / test)), "the test does not use it"


def test_no_module_has_the_name_of_one_of_the_standard_library() -> None:
    kinds = set(STAGES)  # their modules have their names, `select` among them
    files = [path for folder in (*PACKAGES, "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    assert {path.stem for path in files} & sys.stdlib_module_names - kinds - {"__init__", "__main__"} == set()
