"""What is found in a plan, and what is printed of it."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from flows.inspection.common import Options
from flows.inspection.inspectors import inspector_of
from flows.planning.plan import Plan

OVERRIDES = [
    "stages.pretrain.packing=best-fit",
    "stages.cooldown.packing=concatenate",
    "stages.cooldown.goldfish={k: 3, h: 2}",
    # the conversations are made, so that their lengths are known: prompts and answers fit
    "stages.sft.sequence_length=256",
]


def look(plan: Plan, name: str, **options: Any) -> tuple[dict[str, Any], str]:
    """What is found, and what is printed of it."""
    inspector, node = inspector_of(plan, name, Options(**options))
    found = inspector.collect(plan, node, Options(**options))
    console = Console(width=140, record=True, file=io.StringIO())
    inspector.show(console, found)
    return json.loads(json.dumps(found)), console.export_text()
