"""Charts of training stages: which of them share the axis of the loss per token."""

from __future__ import annotations

from flows.report.figures import STAGE_COLOURS, Styles
from flows.report.history import Curve, Series
from flows.report.training_charts import losses, norms, own_losses

STEPS = Series([10, 20], [2.0, 1.0])
LOOK = Styles(["align", "distil"], STAGE_COLOURS)


def test_distances_of_mixers_are_not_drawn_among_losses_in_nats_per_token() -> None:
    rows = {"loss": STEPS, "distance_layer_0": STEPS}
    aligned = Curve("align", "distill", rows, smooth=rows)
    distilled = Curve("distil", "distill", {"loss": STEPS}, smooth={"loss": STEPS})
    shared = losses([aligned, distilled], LOOK, LOOK)
    assert shared is not None and [entry.text for entry in shared.legend] == ["distil"]
    assert losses([aligned], LOOK, LOOK) is None
    titles = [note["text"] for note in own_losses(aligned, LOOK).plot["layout"]["annotations"]]
    assert titles == ["<b>loss (distill)</b>", "<b>distance layer 0</b>"]


def test_norms_have_a_panel_for_each_kind_and_a_line_for_each_layer() -> None:
    layers = ("embedding", "layers.0", "output")
    found = {f"{kind}/{layer}": STEPS for layer in layers for kind in ("weights", "exp_avg")}
    drawn = norms(Curve("align", "pretrain", norms=found), LOOK).plot
    titles = [note["text"] for note in drawn["layout"]["annotations"]]
    assert titles == ["<b>weights</b>", "<b>exp_avg</b>"]
    hovers = [trace["hovertemplate"].split("<br>")[0] for trace in drawn["data"]]
    assert sorted(hovers) == sorted(layers * 2)
    assert {trace["mode"] for trace in drawn["data"]} == {"lines+markers"}  # one point is seen too
