"""The page of `make test-all` has its totals by folder."""

from __future__ import annotations

from pathlib import Path

from tools.record import report

RESULT = """\
<testsuites><testsuite time="200">
<testcase classname="tests.specs.test_units" name="test_a" time="1.5"/>
<testcase classname="tests.specs.test_base" name="test_b" time="112"><failure/></testcase>
<testcase classname="tests.apertus_model.stages.test_harness.TestTask" name="test_c" time="0">
<skipped message="no GPU: there are CPUs"/></testcase>
<testcase classname="tests.test_pins" name="test_d" time="7"/>
</testsuite></testsuites>
"""


def test_results_are_added_up_by_folder(tmp_path: Path) -> None:
    (tmp_path / "result.xml").write_text(RESULT)
    page = report([str(tmp_path / "result.xml")])
    assert [
        line for line in page.splitlines() if line.startswith("| tests/") or line.startswith("| tests |")
    ] == [
        "| tests | passed | skipped | failed | seconds |",
        "| tests | 1 | 0 | 0 | 7 |",
        "| tests/apertus_model | 0 | 1 | 0 | 0 |",
        "| tests/specs | 1 | 0 | 1 | 114 |",
    ]
    assert "**2 passed, 1 skipped, 1 failed**, 2 minutes of tests in 3 minutes." in page
    assert "Failed: `test_b`." in page
    assert "- 1 x no GPU\n" in page
    assert page.splitlines()[-2] == "- 7 s `test_d`"
