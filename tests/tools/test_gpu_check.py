"""The table of a GPU check."""

from pathlib import Path

from tools.gpu_check import report

RESULT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_speed" name="test_a_step_is_fast[eager]" time="12.4">
  <properties><property name="utilisation" value="41%"/><property name="peak" value="30 GB"/></properties>
</testcase>
<testcase classname="tests.gpu.test_attention" name="test_a_backend_is_exact[flex]" time="0.1">
  <skipped message="needs 1 GPU, this machine has none"/>
</testcase>
<testcase classname="tests.gpu.test_kernels" name="test_the_kernel_is_equal" time="3">
  <properties><property name="difference" value="0.5"/></properties>
  <failure message="AssertionError: assert 0.5 &lt; 1e-06&#10;second line">all | of it</failure>
</testcase>
</testsuite></testsuites>"""


def test_a_line_per_check_has_what_was_found_or_why_not(tmp_path: Path) -> None:
    (tmp_path / "result.xml").write_text(RESULT)
    page = report(str(tmp_path / "result.xml"))
    assert "1 passed, 1 failed, 1 not applicable" in page
    assert "| a step is fast: eager | passed | 12 | utilisation: 41%; peak: 30 GB |" in page
    assert "| a backend is exact: flex | not applicable | 0 | needs 1 GPU, this machine has none |" in page
    failed = "difference: 0.5; AssertionError: assert 0.5 < 1e-06 |"
    assert f"| the kernel is equal | **failed** | 3 | {failed}" in page
    assert page.endswith("## the kernel is equal\n\n```\nall | of it\n```\n")
