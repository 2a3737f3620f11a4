"""Prefect's pages of a run: progress, results as tables, and a link to the report.

Invariant: nothing is read back from pages, and a page that cannot be made never ends a stage.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.format import headline
from flows.planning.plan import Plan, Step
from specs.base import flatten
from specs.job import ProgressRow
from specs.redaction import without_secrets

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0


def key(*names: str) -> str:
    """An artifact's key: lower-case letters, digits and dashes, the same in every run."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


@contextmanager
def only_shown(what: str) -> Iterator[None]:
    """Logs a page that cannot be made, as when Prefect's server or the store is unavailable."""
    try:
        yield
    except Exception as error:
        logger.warning("%s is not on Prefect's pages: %s", what, without_secrets(error))


class ProgressBar:
    """The progress of one part, sent to Prefect every few seconds; a part that takes no longer has none. Made
    inside the part's task run, of which it keeps the context for the thread that follows the part."""

    def __init__(self, pipeline: str, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._published_at = clock()
        self._key, self._name, self._context = key(pipeline, name, "progress"), name, copy_context()
        self._id: Any = None

    def update(self, row: ProgressRow, text: str) -> None:
        """Sends the progress in a row, which `text` describes."""
        done = row.done >= row.total
        if self._clock() - self._published_at < INTERVAL_SECONDS and not (done and self._id):
            return
        self._published_at = self._clock()
        self._tell(100.0 * row.done / row.total, text)

    def finish(self) -> None:
        """Shows the part as finished, if it has shown any progress."""
        if self._id is not None:
            self._tell(100.0, "finished")

    def _tell(self, percent: float, text: str) -> None:
        if self._id is None:
            with only_shown(f"the progress of {self._name}"):
                self._id = self._context.run(
                    create_progress_artifact, progress=percent, key=self._key, description=text
                )
            if self._id is None:
                self._published_at = math.inf  # no more tries
            return
        try:
            update_progress_artifact(artifact_id=self._id, progress=percent, description=text)
        except Exception as error:
            logger.debug("progress was not sent: %s", error)


def publish_results(step: Step, plan: Plan) -> None:
    """Publishes the results of a part as a table."""
    with only_shown(f"the table of {step.node.name}"):
        manifest = step.node.artifact(plan.store).manifest
        seconds = manifest.seconds.model_dump() if manifest.seconds else {}
        values = flatten({**manifest.metrics, "seconds": seconds}).items()
        shown = ((name, f"{v:.6g}" if isinstance(v, float) else str(v)) for name, v in values)
        create_table_artifact(
            key=key(plan.pipeline.name, step.node.name),
            table=[{"metric": name, "value": value} for name, value in shown],
            description=f"{step.node.name}: {step.node.path}",
        )


def publish_run(plan: Plan, report: str, failed: dict[str, str]) -> None:
    """Publishes the run on one page: parts with results and seconds, failures, a link to the report."""
    link = report if "://" in report else Path(report).absolute().as_uri()
    lines = [f"# {plan.pipeline.name}", "", f"The report: [{report}]({link})", ""]
    lines += [f"- **{name}** did not finish: {_one_line(reason)}" for name, reason in failed.items()]
    lines += ["", "| part | kind | state | results | seconds | artifact |", "|---|---|---|---|---:|---|"]
    for step in plan.steps.values():
        node, results, seconds = step.node, "", ""
        state = "failed" if node.name in failed else step.reason or step.action
        if step.action == "reuse":
            manifest = node.artifact(plan.store).manifest
            state = state if node.name in failed else "finished"
            results = headline(manifest.metrics)
            seconds = f"{sum(manifest.seconds.model_dump().values()):.0f}" if manifest.seconds else ""
        cells = [node.name, node.kind, _one_line(state), _one_line(results), seconds, f"`{node.path}`"]
        lines.append(f"| {' | '.join(cells)} |")
    with only_shown("the page of the run"):
        create_markdown_artifact(
            key=key(plan.pipeline.name, "run"),
            markdown="\n".join(lines),
            description=f"Run of {plan.pipeline.name}",
        )


def _one_line(text: str) -> str:
    return (text.splitlines() or [""])[0].replace("|", "\\|")
