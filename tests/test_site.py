"""The documentation site is built without a warning, is complete, and works in a browser: pages load, search finds."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from typing import ClassVar

import pytest

from tests.extras import skip_without

skip_without("docs")

from tests.test_docs import DIRECTIVES, DOCS, ROOT, members_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Search text -> a page that must be among the results.
SEARCHES = {"break_when_any_done": "batches", "episode_statistics": "options", "step_timeout_s": "options"}
#: Opens every page and every search in a frame, and reports titles, errors and answers to the server.
DRIVER = """<!doctype html><iframe id="frame" width="1200" height="800"></iframe><script>
const frame = document.getElementById("frame"), report = {titles: {}, errors: [], answers: {}};
const open_page = url => new Promise(done => { frame.onload = () => done(frame.contentWindow); frame.src = url; });
const pause = ms => new Promise(done => setTimeout(done, ms));
const find = async query => {
  const page = await open_page("/?q=" + query);
  for (let tries = 0; tries < 100; tries++) {
    const links = [...page.document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"));
    if (links.length) return links;
    await pause(200);
  }
  return [];
};
(async () => {
  for (const url of PAGES) {
    const page = await open_page(url);
    report.titles[url] = page.document.querySelector("article h1")?.textContent ?? "";
    for (const image of page.document.images) if (!image.complete || !image.naturalWidth) report.errors.push(image.src);
  }
  for (const query of QUERIES) report.answers[query] = await find(query);
  await fetch("/report", {method: "POST", body: JSON.stringify(report)});
})();
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_public_name(site):
    shown = set()
    for page in (site / "reference").glob("*/index.html"):
        shown |= set(re.findall(r'<h\d id="([^"]+)"', page.read_text()))
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    names_alone = set(re.findall(r"^::: ([\w.]+)\n    options:\n      members: false$", pages, re.MULTILINE))
    wanted = {name for path in set(DIRECTIVES) - names_alone if ".facades." not in path for name in members_of(path)}
    assert (wanted | names_alone) - shown == set()


@pytest.mark.slow
def test_the_index_of_the_search_has_every_page_and_option(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    built = {path.parent.relative_to(site).as_posix() + "/" for path in site.glob("*/**/index.html")}
    assert built <= pages
    for query, page in SEARCHES.items():
        assert any(query in entry["text"] and entry["location"].startswith(page) for entry in index["docs"]), query


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, the driver, and takes its report."""

    driver = ""
    report: ClassVar[dict]
    has_reported: ClassVar[threading.Event]

    def do_GET(self):
        if self.path != "/driver":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.driver.encode())

    def do_POST(self):
        self.report.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.has_reported.set()

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt install chromium)")
def test_pages_load_and_search_finds_in_a_browser(site, tmp_path):
    pages = ["/", *(f"/{path.parent.relative_to(site).as_posix()}/" for path in sorted(site.glob("*/**/index.html")))]

    class Handler(_Handler):
        driver = DRIVER.replace("PAGES", json.dumps(pages)).replace("QUERIES", json.dumps(list(SEARCHES)))
        report: ClassVar[dict] = {}
        has_reported = threading.Event()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--remote-debugging-port=0",
    ]
    browser = subprocess.Popen(
        [CHROMIUM, *options, f"http://127.0.0.1:{server.server_port}/driver"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert Handler.has_reported.wait(120), "the browser reported nothing"
    finally:
        browser.terminate()
        browser.wait(20)
        server.shutdown()
        serving.join()
        server.server_close()
    assert [url for url in pages if not Handler.report["titles"].get(url)] == []
    assert Handler.report["errors"] == []
    for query, page in SEARCHES.items():
        assert any(page in link for link in Handler.report["answers"][query]), (query, Handler.report["answers"])
