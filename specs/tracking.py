"""Tracking of training metrics outside the store: TensorBoard, Weights & Biases. All fields are execution."""

from typing import Literal

from specs.base import Spec, execution, location


class WandbSpec(Spec):
    """A project on Weights & Biases. The key comes from the environment (`WANDB_API_KEY`) or from `wandb
    login`, never from a recipe."""

    project: str = execution(min_length=1)
    entity: str | None = execution(None, description="user or team; that of the key by default")
    mode: Literal["online", "offline"] = execution(
        "online", description="offline: rows are kept in a folder, for `wandb sync`"
    )
    folder: str = location("wandb", description="local folder of its files, shared by all nodes")


class Tracking(Spec):
    """Destinations of training metrics besides the store."""

    tensorboard: str | None = location(
        None, description="local folder for TensorBoard: <folder>/<pipeline>/<part>"
    )
    wandb: WandbSpec | None = execution(None)
