from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

from apertus_model.evaluation.harness.model import LOGITS, MOST_ROWS, BatchedModel, open_model, rows_in
from apertus_model.evaluation.harness.tasks import HarnessError
from specs.stages.harness import HarnessPart, Suite


def test_a_batch_has_as_many_rows_as_its_logits_have_room() -> None:
    assert rows_in(10, 512) == MOST_ROWS
    assert rows_in(4096, 131_072) == 1
    for longest in (1, 7, 100, 1000, 5000):
        rows = rows_in(longest, 131_072)
        assert rows == 1 or rows * longest * 131_072 * 8 <= LOGITS
        assert rows in (1, 2, 4, 8, 16, 32, 64)


def test_every_request_is_in_one_batch_with_room_for_its_longest() -> None:
    from lm_eval.models.utils import Collator

    model = object.__new__(BatchedModel)
    model.__dict__["_vocabulary"] = 131_072
    model._max_length = 100_000
    lengths = [5000, 2000, 2000, 900, 900, 900, *[300] * 30, *[10] * 200]
    requests: list[Any] = [("text", [1] * (length - 1), [1]) for length in lengths]
    batches = [
        [len(one[1]) + 1 for one in batch]
        for batch in Collator.get_chunks(requests, fn=model._batch_scheduler)
    ]
    assert [length for batch in batches for length in batch] == lengths
    assert [len(batch) for batch in batches][:4] == [1, 2, 4, 8]
    assert all(len(batch) <= rows_in(batch[0], 131_072) for batch in batches)


def test_vllm_that_is_not_installed_is_a_message(tmp_path: Any) -> None:
    if find_spec("vllm"):
        pytest.skip("vLLM is installed")
    with pytest.raises(HarnessError, match="engine: vllm is chosen, and vLLM cannot be imported"):
        open_model(tmp_path, HarnessPart(suite=Suite(tasks=["x"]), engine="vllm"))


def test_vllm_is_asked_for_the_folder_on_all_gpus(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(VLLM=lambda **stated: SimpleNamespace(stated=stated, tokenizer=None))
    monkeypatch.setitem(sys.modules, "lm_eval.models.vllm_causallms", engine)
    suite = Suite(tasks=["x"], max_length=512, seed=3)
    opened: Any = open_model(tmp_path, HarnessPart(suite=suite, engine="vllm"), gpus=4)
    assert opened.stated == {
        "pretrained": str(tmp_path),
        "dtype": "auto",
        "tensor_parallel_size": 4,
        "batch_size": "auto",
        "max_length": 512,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "seed": 3,
    }
