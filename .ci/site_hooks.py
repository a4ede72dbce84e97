"""Hooks of the documentation site: links to files of the repository that are not pages become their names."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./((?!images/|reference/)[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page's text without links that leave the folder of the documentation."""
    is_below = "/" in page.file.src_uri
    return markdown if is_below else _OUTSIDE.sub(r"\1", markdown)
