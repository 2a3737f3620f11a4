"""The parameters of a deployment: typed, so that Prefect shows a form for them and refuses invalid ones
before a run is made. The recipe is checked when the run begins.
"""

from typing import Annotated

from pydantic import Field

from specs.redaction import USERINFO

WITHOUT_CREDENTIALS = {"not": {"pattern": f"://{USERINFO}"}}
"""JSON Schema for the server, which refuses invalid parameters. The flow does not check it, since Prefect
logs all parameters when the flow refuses one."""
RecipeFile = Annotated[
    str,
    Field(
        title="Recipe",
        pattern=r"^.+\.ya?ml$",
        description="YAML file of the pipeline, on the worker's machine; relative to the checkout",
    ),
]
Override = Annotated[
    str,
    Field(
        title="PATH=VALUE",
        pattern=r"^[^=.]+(\.[^=.]+)*=",
        examples=["stages.sft.optimizer.lr=2e-6"],
        description="like --set",
        json_schema_extra=WITHOUT_CREDENTIALS,
    ),
]
StageName = Annotated[str, Field(title="Stage", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
StoreUrl = Annotated[
    str,
    Field(
        title="Store",
        pattern=r"^([A-Za-z0-9+.:-]+://.*|[^:]+|/.*)$",
        description=(
            "folder or fsspec URL, without credentials: the client of the storage reads them from the"
            " worker's environment"
        ),
        json_schema_extra=WITHOUT_CREDENTIALS,
    ),
]
