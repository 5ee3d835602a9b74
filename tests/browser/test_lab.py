"""The course as a learner sees it: JupyterLab in a real browser, with real engines behind it.

Runs where a Chromium is found. `KVLAB_SCREENSHOTS=folder` keeps pictures of the pages.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil
import pytest

from kvlab import doctor, jupyter, notebooks
from kvlab.paths import ROOT

CHROMIUM = doctor.chromium()
if CHROMIUM is None:
    pytest.skip(
        "no Chromium found; on Debian or Ubuntu: apt-get install chromium", allow_module_level=True
    )
sync_api = pytest.importorskip("playwright.sync_api")

RUN_ALL_TIMEOUT_MS = 300_000
CELLS = """() => window.jupyterapp.shell.currentWidget.model.sharedModel.toJSON().cells"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A JupyterLab over copies of chapters and labs, so that the checkout stays as it is."""
    root = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "chapters", root / "chapters")
    notebooks.copy_labs(root / "my")
    with jupyter.serve(root, open_app_in_browser=True) as server:
        yield server
    assert not psutil.pid_exists(server.pid)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM),
            # Chromium has no sandbox of its own when root runs it, as CI does.
            chromium_sandbox=os.geteuid() != 0,
            args=["--disable-gpu", "--disable-background-networking", "--disable-sync"],
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser, course):
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    page.set_default_timeout(60_000)
    page.elsewhere = []
    page.on("request", lambda r: page.elsewhere.append(r.url) if _elsewhere(r.url) else None)
    yield page
    page.close()


def _elsewhere(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


def _open(page, course, notebook):
    page.goto(course.url(f"lab/tree/{notebook}", reset=True))
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
        "?.connectionStatus === 'connected'"
    )


def _run_all(page):
    page.set_default_timeout(RUN_ALL_TIMEOUT_MS)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.set_default_timeout(60_000)


def _outputs(page):
    return [output for cell in page.evaluate(CELLS) for output in cell.get("outputs", [])]


def _text(outputs):
    parts = []
    for output in outputs:
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        parts.append("".join(text))
    return "\n".join(parts)


def _picture(page, name):
    if folder := os.environ.get("KVLAB_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")


def _answer(page, cell_id, source):
    """Type an answer into a cell, run that cell, and give back the text of its verdict."""
    index = [cell["id"] for cell in page.evaluate(CELLS)].index(cell_id)
    cell = page.locator(f'.jp-Cell[data-windowed-list-index="{index}"]')
    cell.scroll_into_view_if_needed()
    editor = cell.locator(".cm-content")
    editor.click()
    editor.press("ControlOrMeta+a")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")
    verdict = cell.get_by_role("status")
    return cell, verdict


def test_lab_runs_and_verdicts_follow_the_answer(page, course):
    _open(page, course, "my/00_one_request.ipynb")
    _run_all(page)
    outputs = _outputs(page)
    assert [o for o in outputs if o["output_type"] == "error"] == []
    text = _text(outputs)
    assert text.count("not tried") == 3
    assert "vLLM found    128" in text

    source = 'token_forwards = {"without cache": 1800, "with cache": %s}\n\n'
    source += 'check("00.1", token_forwards)'
    wrong, right = source % "85", source % "84"
    cell, verdict = _answer(page, "ex1", wrong)
    sync_api.expect(verdict).to_contain_text("failed")
    cell.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.insert_text(right)
    page.keyboard.press("Control+Enter")
    sync_api.expect(verdict).to_contain_text("passed")
    _picture(page, "lab-00")
    assert page.elsewhere == []


def test_slider_changes_the_picture_by_keyboard(page, course):
    _open(page, course, "chapters/00_one_request.ipynb")
    _run_all(page)
    assert [o for o in _outputs(page) if o["output_type"] == "error"] == []

    picture = page.locator(".widget-html svg[role=img]")
    picture.scroll_into_view_if_needed()
    assert "8 prompt tokens" in picture.get_attribute("aria-label")
    handle = page.locator(".widget-slider .noUi-handle").first
    handle.focus()
    for _ in range(3):
        handle.press("ArrowRight")
    # Each key press redraws; expect waits until the last one has.
    sync_api.expect(picture).to_have_attribute("aria-label", re.compile("11 prompt tokens"))
    _picture(page, "chapter-00")
    assert page.elsewhere == []
