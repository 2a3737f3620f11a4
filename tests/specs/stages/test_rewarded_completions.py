from __future__ import annotations

import pytest
from pydantic import ValidationError

from specs.stages.rewarded_completions import RewardedCompletionsStage


def test_a_part_with_completions_is_named_once() -> None:
    fields = {"kind": "rewarded_completions", "from": "sft", "completions": ["chat/a", "chat/a"]}
    with pytest.raises(ValidationError, match="a part is repeated; name it once"):
        RewardedCompletionsStage.model_validate(fields)
