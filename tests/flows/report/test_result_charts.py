"""Charts of results."""

from __future__ import annotations

from flows.report.figures import Style
from flows.report.result_charts import quantiles, results
from flows.report.results import Evaluation


def test_bars_are_labelled_in_plain_numbers() -> None:
    values = {
        "evaluate": {
            "perplexity": 1.0,
            "perplexity/code": 55.19,
            "perplexity/long": 999.6,
            "perplexity/talk": 25_120.4,
        }
    }
    found = [Evaluation(name, name, name, name, metrics) for name, metrics in values.items()]
    drawn = results(found, {"evaluate": Style("#000")})[0].plot["data"][0]
    assert list(drawn["text"]) == ["55.2", "1,000", "25,120", "1"]


def test_quantiles_say_which_prompts_have_no_pair() -> None:
    caption = quantiles(
        "preferences/pairs", [1, 3], {"equal_rewards": 12, "few_different_completions": 2}
    ).summary
    assert caption.endswith("Prompts without a pair: 12 for equal rewards, 2 for few different completions.")
    assert quantiles("preferences/pairs", [1, 3], {}).summary.endswith("of their reward.")
