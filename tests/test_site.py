"""The documentation site is built without a warning, and is complete."""

import html
import json
import os
import re
import subprocess
import sys

import pytest

from tests.extras import skip_without

skip_without("docs")

from tests.test_docs import COLUMNS, DIRECTIVES, DOCS, OF_FACADE, ROOT, members_of

#: Search text -> a page that must be among the results.
SEARCHES = {
    "break_when_any_done": "batches",
    "episode_statistics": "options",
    "step_timeout_s": "options",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_public_name(site):
    shown = set()
    for page in (site / "reference").glob("*/index.html"):
        shown |= set(re.findall(r'<h\d id="([^"]+)"', page.read_text()))
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    names_alone = set(
        re.findall(
            r"^::: ([\w.]+)\n    options:\n      members: false$", pages, re.MULTILINE
        )
    )
    wanted = {
        name
        for path in set(DIRECTIVES) - names_alone
        if not OF_FACADE.match(path)
        for name in members_of(path)
    }
    assert (wanted | names_alone) - shown == set()


@pytest.mark.slow
def test_signatures_are_broken_over_lines_and_names_stand_alone(site):
    pages = "".join(page.read_text() for page in (site / "reference").glob("**/*.html"))
    shown = re.findall(r'doc-signature[^"]*">(.*?)</div>', pages, re.DOTALL)
    lines = [
        html.unescape(re.sub("<[^>]+>", "", line))
        for line in "\n".join(shown).split("\n")
    ]
    assert len(lines) > len(shown) > 100
    assert max(map(len, lines)) <= COLUMNS
    assert not re.search("<code>[^<]*`|,</span></code></b>", pages)


@pytest.mark.slow
def test_the_index_of_the_search_has_every_page_and_option(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    built = {
        path.parent.relative_to(site).as_posix() + "/"
        for path in site.glob("*/**/index.html")
    }
    assert built <= pages
    for query, page in SEARCHES.items():
        assert any(
            query in entry["text"] and entry["location"].startswith(page)
            for entry in index["docs"]
        ), query
