"""A graph as a drawing: layers, boxes and pages."""

from __future__ import annotations

import pytest

from flows.graph_layout import HEIGHT, WIDTH, draw


def test_layers_follow_what_is_read_and_implied_arrows_are_left_out() -> None:
    reads = {
        "tokenizer": [],
        "corpus": ["tokenizer"],
        "train": ["corpus", "tokenizer"],
        "measure": ["train", "corpus"],
        "export": ["train"],
    }
    drawing = draw(reads, {"export": ["measure"]})
    y = {box.stage: box.y for box in drawing.boxes}
    assert y["tokenizer"] < y["corpus"] < y["train"] < y["measure"] < y["export"]
    drawn = {(arrow.begin, arrow.end, arrow.waits) for arrow in drawing.arrows}
    assert drawn == {
        ("tokenizer", "corpus", False),
        ("corpus", "train", False),
        ("train", "measure", False),
        ("train", "export", False),
        ("measure", "export", True),
    }


def test_boxes_do_not_overlap_and_lie_inside_the_drawing() -> None:
    reads: dict[str, list[str]] = {"root": []}
    reads |= {f"mixture-{index}": ["root"] for index in range(5)}
    for index in range(9):
        reads[f"train-{index}"] = [f"train-{index - 1}" if index else "mixture-0", f"mixture-{index % 5}"]
    reads |= {f"measure-{index}": [f"train-{index}"] for index in range(9)}
    drawing = draw(reads, {})
    assert drawing.height > drawing.width  # a deep graph runs from top to bottom
    for one in drawing.boxes:
        assert (
            one.x >= 0 and one.x + WIDTH <= drawing.width and one.y >= 0 and one.y + HEIGHT <= drawing.height
        )
        for other in drawing.boxes:
            assert one is other or abs(one.x - other.x) >= WIDTH or abs(one.y - other.y) >= HEIGHT
    assert draw(reads, {}) == drawing


@pytest.mark.parametrize("layers", range(1, 14))
def test_long_chain_is_split_across_pages_between_boxes(layers: int) -> None:
    drawing = draw({f"stage-{index}": [f"stage-{index - 1}"] if index else [] for index in range(layers)}, {})
    assert drawing.width <= 680 / 0.75  # the width of paper, at three quarters of the size
    assert len(drawing.cuts) == (layers - 1 if layers > 4 else 0)
    assert all(cut <= box.y or cut >= box.y + HEIGHT for cut in drawing.cuts for box in drawing.boxes)


def test_variants_in_few_layers_are_drawn_from_left_to_right() -> None:
    reads: dict[str, list[str]] = {"root": [], "data": ["root"]}
    for index in range(6):
        reads |= {
            f"train-{index}": ["data"],
            f"measure-{index}": [f"train-{index}"],
            f"export-{index}": [f"measure-{index}"],
        }
    assert draw(reads, {}).cuts == []
