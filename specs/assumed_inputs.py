"""What a recipe reads beside its sources and may be planned without: files and Hugging Face models on the machine that runs it.

Invariant: nothing here bears identity. What is available counts as it is; a declaration only stands in for what is not, in a plan.
"""

from __future__ import annotations

from specs.base import Spec, execution
from specs.model import ModelSpec


class DeclaredModel(Spec):
    """The dimensions of a Hugging Face model whose folder is unavailable."""

    model: ModelSpec = execution()
    context: int = execution(65_536, ge=1, description="its longest sequences, in tokens")
    chat: bool = execution(False, description="it ends its turns")


class AssumedInputs(Spec):
    """`files`: folders or files (of a tokenizer, a filter, a reward model, tasks) that a plan may do without; what lies below them too.
    `models`: what `hf:` references stand for where their folders are unavailable: `{hf:owner/name: {model: {flavour: 8b}}}`."""

    files: list[str] = execution(default_factory=list)
    models: dict[str, DeclaredModel] = execution(default_factory=dict)

    def covers(self, url: str) -> bool:
        """Whether a url is one of `files`, or lies below one."""
        return any(url == root or url.startswith(f"{root.rstrip('/')}/") for root in self.files)
