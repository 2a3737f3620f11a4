"""What a memorisation measures, and its names."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.memorisation import Memorisation


def memorisation(**fields: Any) -> Memorisation:
    return Memorisation.model_validate({"probes": "corpus/books", **fields})


def test_every_prefix_offset_and_decoding_has_its_metrics() -> None:
    spec = memorisation(prefixes=[50, 100], offsets=[0, 8], suffix=20, nucleus={})
    names = spec.metrics([0, 128])
    assert len(names) == len(set(names)) == 1 + 2 * 2 * 2 * (1 + 3 + 2 * 4 * 3)
    for name in (
        "memorisation/passes",
        "memorisation/truth/prefix-50/offset-0/sequences/0",
        "memorisation/truth/prefix-100/offset-8/type_token_ratio/128/high",
        "memorisation/nucleus/prefix-100/offset-8/common_substring/128/low",
    ):
        assert name in names
    assert not any("nucleus" in name for name in memorisation().metrics([0]))


def test_the_probes_enter_the_fingerprint_by_what_they_are_only() -> None:
    assert memorisation().identity_fields() == memorisation(probes="corpus/other").identity_fields()
    other = [memorisation(prefixes=[9]), memorisation(suffix=9), memorisation(min_type_token_ratio=0.5)]
    assert all(spec.identity_fields() != memorisation().identity_fields() for spec in other)


def test_a_decoding_is_one_continuation_without_an_end() -> None:
    assert list(memorisation().decodings) == ["greedy"]
    found = memorisation(suffix=7, nucleus={"top_p": 0.8, "seed": 3}, engine="vllm", batch_size=9).decodings
    greedy, nucleus = found["greedy"], found["nucleus"]
    assert greedy.greedy and not nucleus.greedy
    assert (nucleus.top_p, nucleus.temperature, nucleus.seed) == (0.8, 1.0, 3)
    for sampling in (greedy, nucleus):
        assert (sampling.n, sampling.max_new_tokens, sampling.batch_size, sampling.engine) == (
            1,
            7,
            9,
            "vllm",
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefixes": [50, 100, 50]}, "50 is repeated; list it once"),
        ({"offsets": []}, "at least 1 item"),
        ({"prefixes": [0]}, "greater than or equal to 1"),
        ({"nucleus": {"top_p": 0}}, "greater than 0"),
        ({"nucleus": {"temperature": 0}}, "greater than or equal to 0.01"),
        ({"prefix": 50}, "prefix"),
    ],
)
def test_settings_without_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        memorisation(**fields)
