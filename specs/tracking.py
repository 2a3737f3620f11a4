"""Tracking of training metrics beside the store: TensorBoard, Weights & Biases. Execution only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from specs.base import Spec, execution


class WandbSpec(Spec):
    """A project on Weights & Biases. The key comes from the environment (`WANDB_API_KEY`) or from `wandb login`, never from a recipe."""

    project: str = execution(min_length=1)
    entity: str | None = execution(None, description="user or team; that of the key by default")
    mode: Literal["online", "offline"] = execution("online", description="offline: rows are kept in a folder, for `wandb sync`")
    folder: str = execution("wandb", description="local folder of its files, shared by all nodes")


class Tracking(Spec):
    """Destinations of training metrics beside the store."""

    tensorboard: str | None = execution(None, description="local folder for TensorBoard: <folder>/<pipeline>/<part>")
    wandb: WandbSpec | None = execution(None)

    def located(self) -> dict[str, Any]:
        """The JSON form, with absolute folders."""
        document = self.model_dump(mode="json")
        if self.tensorboard is not None:
            document["tensorboard"] = str(Path(self.tensorboard).absolute())
        if self.wandb is not None:
            document["wandb"]["folder"] = str(Path(self.wandb.folder).absolute())
        return document
