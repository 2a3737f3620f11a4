"""Tasks of lm-evaluation-harness, as an `evaluate` stage states them and as its `harness` parts hold them.

A suite is a set of tasks with one set of settings, and a part of its own: changing a suite reruns no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from specs.base import Spec, execution, identity, location, option
from specs.launch import HeldModel
from specs.sources import Url
from specs.stages.base import Part

FAMILIES = ("perplexity", "forgetting", "loss", "memorisation", "reward", "kl", "sharpness", "sparsity")
"""First words of other metrics, which no suite may have as its name."""
TASK_FILES = ["**/*.yaml", "**/*.json", "**/*.jsonl", "**/*.parquet"]
"""The files that are read from a folder of the user's own tasks."""
REQUESTS_PER_UNIT = {"loglikelihood": 512, "loglikelihood_rolling": 32, "generate_until": 256}
"""Requests per unit, by type. Units consist of whole batches, so a change needs a new part version."""
MOST_ROWS = 64
"""The most requests in a batch, with transformers."""
SuiteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$")]
TaskName = Annotated[str, StringConstraints(pattern=r"^[^\s/:][^\s:]*$")]


class GenerationArguments(Spec):
    """Arguments of generation, in place of those of every task of a suite that generates text."""

    max_gen_toks: int | None = option(None, ge=1, description="maximum number of generated tokens")
    until: list[str] | None = option(None, description="texts that end an answer")
    do_sample: bool | None = option(None, description="needed for a temperature, which is ignored without it")
    temperature: float | None = option(None, ge=0)
    top_p: float | None = option(None, gt=0, le=1)
    top_k: int | None = option(None, ge=0)

    def conflicts(self) -> Iterator[str]:
        drawn = [name for name in ("temperature", "top_p", "top_k") if getattr(self, name)]
        if drawn and self.do_sample is not True:
            yield f"{' and '.join(drawn)} need do_sample: true; answers are greedy without it"


class Requests(Spec):
    """The requests that the tasks of a suite make of the model, for estimates: a plan cannot count them."""

    requests: int = execution(ge=1, description="prompts; a multiple choice has one for each answer")
    tokens: int | None = execution(
        None,
        ge=1,
        description="mean tokens of a request; by default as in the suite's last run, of a sample (`limit`)",
    )
    new_tokens: int = execution(0, ge=0, description="mean generated tokens of a request, beside `tokens`")


class ClassifierSpec(Spec):
    """A local classifier of answers, such as of toxicity or of refusals, in place of a web service. It adds
    the metrics `<label>`, the mean probability of the label, and `<label>_rate`, the share of answers with
    at least 0.5."""

    model: Url = location(
        min_length=1, description="folder (any fsspec URL) with a Hugging Face sequence classifier"
    )
    label: str = identity(
        pattern=r"^[^/,\s]+$", description="one of the classifier's labels (`id2label` of its config.json)"
    )
    max_tokens: int = option(
        512, ge=1, description="maximum tokens of an answer that the classifier reads; the rest is cut off"
    )


class Suite(Spec):
    """Tasks with one set of settings. Settings that are not stated are those of the harness."""

    tasks: list[TaskName] = identity(
        min_length=1, description="names of tasks, groups or tags, each as the installed harness has it"
    )
    few_shot: int | None = option(
        None, ge=0, description="examples before each question; by default as each task says"
    )
    chat_template: bool | None = identity(
        None,
        neutral=False,
        description="whether questions are asked through the model's chat template; by default for models "
        "that were trained on conversations, and not for others",
    )
    system_instruction: str | None = option(None, min_length=1)
    few_shot_as_turns: bool | None = identity(
        None,
        neutral=False,
        description="whether each example is a turn of the conversation, in place of text in the "
        "question; by default with the chat template",
    )
    generation: GenerationArguments | None = option(None)
    max_length: int | None = option(
        None, ge=16, description="tokens of a prompt and its answer; the model's context by default"
    )
    sequence_lengths: list[Annotated[int, Field(ge=256)]] | None = option(
        None,
        min_length=1,
        description="for tasks that write prompts of stated lengths (ruler): these lengths in tokens; 4096"
        " by default",
    )
    seed: int | None = option(
        None,
        ge=0,
        description="seed of examples and sampling; by default the harness's own, 0 for Python and 1234 for"
        " the others",
    )
    limit: int | None = option(None, ge=1, description="maximum number of documents per task")
    sandbox: Literal["bubblewrap"] | None = option(
        None,
        description="runs the code that a model writes in the tasks that need it (HumanEval, MBPP), "
        "which are refused without it: a Debian package, on the machine that runs the suite",
    )
    classifier: ClassifierSpec | None = option(
        None,
        description="reads every generated answer of the suite; needed by tasks that ask a web service "
        "about each answer (realtoxicityprompts)",
    )

    expected: Requests | None = execution(None)

    def conflicts(self) -> Iterator[str]:
        if len(set(self.tasks)) < len(self.tasks):
            twice = sorted({task for task in self.tasks if self.tasks.count(task) > 1})
            yield f"tasks names {', '.join(twice)} twice; list each once"
        if self.few_shot_as_turns and self.chat_template is False:
            yield "few_shot_as_turns needs the chat template; leave out chat_template: false"

    def resolved(self, chat: bool) -> Suite:
        """The suite with every default that depends on the model stated. `chat`: whether the model was
        trained on conversations."""
        template = chat if self.chat_template is None else self.chat_template
        turns = template if self.few_shot_as_turns is None else self.few_shot_as_turns
        return self.model_copy(update={"chat_template": template, "few_shot_as_turns": turns})


class Harness(Spec):
    """Suites of tasks of lm-evaluation-harness (an extra: `pip install apertus[harness]`), run on the
    exported model from local files only. Metrics are named `<suite>/<task>/<metric>`."""

    suites: dict[SuiteName, Suite] = identity(min_length=1)
    datasets: str | None = location(
        None,
        min_length=1,
        description="folder, on any fsspec URL, with the data sets of the tasks by their Hub id: "
        "`<datasets>/allenai/ai2_arc/` is that repository as a download gives it",
    )
    include: str | None = location(
        None,
        min_length=1,
        description="folder with your task files; `installed:examples/tasks` has an example",
    )
    engine: Literal["transformers", "vllm"] = option(
        "transformers",
        description="vllm: in a separate environment, which has the harness too, on launch.parallel.tp GPUs",
    )

    def conflicts(self) -> Iterator[str]:
        if reserved := sorted(set(self.suites) & set(FAMILIES)):
            yield f"suite {reserved[0]!r} has the name of other metrics; choose another name"


class HarnessPart(Part):
    """A resolved suite, with its tasks as the recipe names them; its requests are answered in units. Inputs:
    `model` (an export), `tasks` (the task files) where `include` is given, `classifier` where one is stated,
    and `data:<Hub id>` for each data set that the tasks read."""

    VERSION: ClassVar[int] = 5
    WORKERS: ClassVar[int] = 1
    suite: Suite = identity()
    engine: Literal["transformers", "vllm"] = option("transformers")
    datasets: str | None = execution(None, description="folder of the data sets")
    include: str | None = execution(None, description="folder of the task files")

    @property
    def held_model(self) -> HeldModel:
        return HeldModel("model", vllm=self.engine == "vllm", shared=True)
