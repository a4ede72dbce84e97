"""Write a script's part of a page of docs/, between two lines that name the script; leave the rest unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_part(page: Path, script: str, lines: Sequence[str]) -> None:
    """Replace the script's part of a page; append it if there is none.

    Args:
        page: of Markdown; created if it does not exist.
        script: its name, in the two enclosing lines.
        lines: without line ends.
    """
    begin, end = (
        f"<!-- written by {script} -->",
        f"<!-- end of what {script} writes -->",
    )
    text = page.read_text() if page.exists() else ""
    if begin not in text:
        text = f"{text}\n{begin}\n{end}\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(before + "\n".join([begin, "", *lines, "", end]) + after)
