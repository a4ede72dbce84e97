"""Scripts rewrite their own parts of pages; and the summary's tables."""

from tests.extras import skip_without

skip_without("cli")

from benchmarks import ours, peers
from benchmarks.page import sheet_of_facades, sheet_of_others
from benchmarks.parts import write_part


def test_part_is_replaced_and_the_rest_of_the_page_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- written by a.py -->\nold\n<!-- end of what a.py writes -->\nafter\n"
    )
    write_part(page, "a.py", ["one"])
    write_part(page, "b.py", ["two", "three"])
    first = page.read_text()
    write_part(page, "b.py", ["two", "three"])
    write_part(page, "a.py", ["one"])
    assert page.read_text() == first
    assert "old" not in first
    assert first.startswith(
        "before\n<!-- written by a.py -->\n\none\n\n<!-- end of what a.py writes -->\nafter\n"
    )
    assert "<!-- written by b.py -->\n\ntwo\nthree\n\n<!-- end" in first


def row(steps_per_s, ratio=None):
    ratios = None if ratio is None else [ratio - 1, ratio, ratio + 1]
    figures = {"steps_per_s": steps_per_s, "batch_us": [1.0, 8e6 / steps_per_s, 9.0]}
    return {"status": "measured", "cpu_ratio": ratios, "wall_ratio": ratios, **figures}


def test_the_summarys_tables_have_what_was_measured_and_nothing_else():
    tiny = {
        ours.AUTO: row(80_000, 1.0),
        peers.GYMNASIUM_ASYNC: row(5_000, 16.0),
        peers.TIANSHOU: {"status": "gone"},
    }
    cartpole = {
        ours.AS_SB3: row(24_000, 0.5),
        peers.SB3_SUBPROC: row(5_000, 3.0),
        ours.AS_SB3_WIDE: {"status": "no"},
    }
    workloads = {
        "tiny": {"reference": ours.AUTO, "contenders": tiny},
        "cartpole": {"reference": ours.ONE, "contenders": cartpole},
    }
    assert sheet_of_others({"workloads": workloads}).rows == [
        [
            "no-op envs, 4 floats",
            peers.GYMNASIUM_ASYNC,
            "1,600",
            "100",
            "16x (15-17)",
            "16x (15-17)",
        ]
    ]
    assert sheet_of_facades({"workloads": workloads}).rows == [
        [f"{ours.AS_SB3}: {peers.SB3_SUBPROC}", "1,600", "333", "6.0x", "6.0x"]
    ]
    assert not sheet_of_others(
        {"workloads": workloads}, ("tiny",), (peers.TIANSHOU,)
    ).rows
    assert not sheet_of_others({}).rows
