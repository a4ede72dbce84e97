"""Pages are written to the checkout, through whichever link the benchmarks are imported."""

from benchmarks import ROOT, cluster_page, page


def test_pages_are_in_the_checkout():
    assert (ROOT / "pyproject.toml").exists()
    assert cluster_page.PAGE.exists()
    for name in (page.PAGE, "docs/reports/faults.md", "docs/reports/scaling.md", "docs/sizing.md"):
        assert (ROOT / name).exists(), name
