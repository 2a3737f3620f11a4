"""Files and Hugging Face models that a recipe reads besides its sources and can be planned without.

Invariant: no field here is an identity field. A plan uses a declaration only for an unavailable input.
"""

from specs.base import Spec, execution, location
from specs.model import ModelSpec


class DeclaredModel(Spec):
    """The facts that a plan needs about a Hugging Face model whose folder is unavailable."""

    model: ModelSpec | None = execution(
        None, description="dimensions of an Apertus; without them, a model of another architecture"
    )
    shape: ModelSpec | None = execution(
        None,
        description="for a model of another architecture: dimensions for estimates, those of a dense"
        " decoder, with activation: swiglu where its feed-forward has a gate",
    )
    context: int = execution(65_536, ge=1, description="length of its longest sequences, in tokens")
    chat: bool = execution(
        False,
        description="whether it ends its turns with the end-of-turn token, or has a chat template",
    )


class AssumedInputs(Spec):
    """Inputs that may be unavailable when a recipe is planned."""

    files: list[str] = location(
        default_factory=list,
        description="folders (with all below them) or files of a tokenizer, a filter, a reward model or"
        " tasks",
    )
    models: dict[str, DeclaredModel] = location(
        default_factory=dict,
        description="dimensions of `hf:` models whose folders are unavailable: `{hf:owner/name: {model:"
        " {flavour: 8b}}}`",
    )

    def covers(self, url: str) -> bool:
        """Whether a url is one of `files`, or is below one."""
        return any(url == root or url.startswith(f"{root.rstrip('/')}/") for root in self.files)
