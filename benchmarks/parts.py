"""Parts of pages of docs/ that a script writes, between two lines that name it; the rest of the page is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_part(page: Path, script: str, lines: Sequence[str]) -> None:
    """Put lines in place of what the script has written before; at the page's end if it has not.

    Args:
        page: of Markdown; made if it is not there.
        script: what the lines that enclose the part name.
        lines: without line ends.
    """
    begin, end = f"<!-- written by {script} -->", f"<!-- end of what {script} writes -->"
    text = page.read_text() if page.exists() else ""
    if begin not in text:
        text = f"{text}\n{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after)
