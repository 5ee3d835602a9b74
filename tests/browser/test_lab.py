"""The course as a learner sees it: JupyterLab in a real browser, with real engines behind it.

Runs where a Chromium is found. `KVLAB_SCREENSHOTS=folder` keeps pictures of the pages.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nbformat
import psutil
import pytest

from kvlab import doctor, jupyter, notebooks
from kvlab.exercises import load_all
from kvlab.paths import ROOT

CHROMIUM = doctor.chromium()
if CHROMIUM is None:
    pytest.skip(
        "no Chromium found; on Debian or Ubuntu: apt-get install chromium", allow_module_level=True
    )
sync_api = pytest.importorskip("playwright.sync_api")
sync_api.expect.set_options(timeout=60_000)  # a busy machine takes its time

RUN_ALL_TIMEOUT_MS = 300_000
LABS = sorted(path.stem for path in (ROOT / "labs").glob("*.ipynb"))
ENGINE = """
import time
from kvlab.engines import vllm
engine = vllm.start("tiny-random")
print("pid", engine.pid, flush=True)
time.sleep(3600)
"""
RUN = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
CELLS = """() => window.jupyterapp.shell.currentWidget.model.sharedModel.toJSON().cells"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A JupyterLab over copies of chapters and labs, so that the checkout stays as it is."""
    root = tmp_path_factory.mktemp("course")
    shutil.copytree(ROOT / "chapters", root / "chapters")
    notebooks.copy_labs(root / "my")
    cell = nbformat.v4.new_code_cell(ENGINE)
    engine = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": notebooks.KERNEL})
    nbformat.write(engine, root / "engine.ipynb")
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
    _retype(page, cell, source)
    return cell, cell.get_by_role("status")


def _retype(page, cell, source):
    """Replace a cell's source by the keyboard, and run it."""
    cell.locator(".cm-content").click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


def _run_first(page, count):
    """Run the first `count` code cells and wait for them."""
    page.evaluate(
        """async (count) => {
            const panel = window.jupyterapp.shell.currentWidget;
            const codes = panel.content.widgets.filter((w) => w.model.type === 'code');
            for (const cell of codes.slice(0, count)) {
                panel.content.activeCellIndex = panel.content.widgets.indexOf(cell);
                await window.jupyterapp.commands.execute('notebook:run-cell');
            }
        }""",
        count,
    )


@pytest.mark.parametrize("lab", LABS)
def test_every_lab_runs_whatever_the_state_of_its_exercises(page, course, lab):
    _open(page, course, f"my/{lab}.ipynb")
    _run_all(page)
    outputs = _outputs(page)
    assert [o for o in outputs if o["output_type"] == "error"] == []
    open_ = [e for e in load_all().values() if e.lab == lab[:2]]
    assert _text(outputs).count(": not tried") == len(open_)
    _picture(page, f"lab-{lab[:2]}-open")
    assert page.elsewhere == []


def test_verdicts_follow_the_answer_and_hints_come_in_stages(page, course):
    _open(page, course, "my/00_one_request.ipynb")
    _run_first(page, 1)
    source = 'token_forwards = {"without cache": 1800, "with cache": %s}\n\n'
    source += 'check("00.1", token_forwards)'
    cell, verdict = _answer(page, "ex1", source % "85")
    sync_api.expect(verdict).to_contain_text("failed")
    _retype(page, cell, 'hint("00.1")\nhint("00.1")')
    sync_api.expect(cell.locator(".jp-OutputArea")).to_contain_text("Hint 2 of 3")
    _retype(page, cell, source % "84")
    sync_api.expect(verdict).to_contain_text("passed")
    _picture(page, "lab-00")
    assert page.elsewhere == []


def test_a_restarted_kernel_leaves_no_engine_behind(page, course):
    _open(page, course, "engine.ipynb")
    page.evaluate(RUN)  # does not wait for the end, which would be an hour away
    page.wait_for_function(
        "() => JSON.stringify(window.jupyterapp.shell.currentWidget.model.sharedModel"
        ".toJSON().cells[0].outputs).includes('pid')",
        timeout=RUN_ALL_TIMEOUT_MS,
    )
    pid = int(re.search(r"pid (\d+)", _text(_outputs(page)))[1])
    engine = psutil.Process(pid)
    family = [engine, *engine.children(recursive=True)]
    assert len(family) > 1
    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
    )
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def _chapter(page, course, notebook, picture):
    """Open a chapter, see its stored picture, run it as far as that picture's cell; gives it."""
    _open(page, course, f"chapters/{notebook}.ipynb")
    cells = page.evaluate(CELLS)
    index = next(n for n, cell in enumerate(cells) if f"\n{picture}(" in cell["source"])
    page.evaluate(
        "(n) => window.jupyterapp.shell.currentWidget.content.scrollToItem(n, 'center')", index
    )
    cell = page.locator(f'.jp-Cell[data-windowed-list-index="{index}"]')
    sync_api.expect(cell.locator(".jp-RenderedSVG img")).to_be_visible()
    _picture(page, f"stored-{notebook[:2]}")
    count = sum(one["cell_type"] == "code" for one in cells[: index + 1])
    _run_first(page, count)
    assert [o for o in _outputs(page) if o["output_type"] == "error"] == []
    return cell


def test_a_stored_picture_fits_a_narrow_page(page, course):
    page.set_viewport_size({"width": 800, "height": 1400})
    _open(page, course, "chapters/01_scheduling.ipynb")
    picture = page.locator(".jp-RenderedSVG img").first
    picture.scroll_into_view_if_needed()
    wide, room = picture.evaluate("(img) => [img.width, img.parentElement.clientWidth]")
    assert 0 < wide <= room < 800


def test_the_timetable_moves_by_keyboard(page, course):
    _chapter(page, course, "01_scheduling", "Timeline")
    picture = page.locator(".widget-html svg[role=img]").first
    picture.scroll_into_view_if_needed()
    before = picture.get_attribute("aria-label")
    step = int(re.match(r"Step (\d+) of", before)[1])
    handle = (
        page.get_by_label("step")
        .locator(".noUi-handle")
        .or_(page.locator(".widget-hslider", has_text="step").locator(".noUi-handle"))
    )
    handle.first.focus()
    handle.first.press("ArrowRight")
    sync_api.expect(picture).to_have_attribute("aria-label", re.compile(f"Step {step + 1} of"))
    _picture(page, "chapter-01")
    assert page.elsewhere == []


def test_slider_changes_the_picture_by_keyboard(page, course):
    _chapter(page, course, "00_one_request", "ForwardsPicture")
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


EVENTS = """
from kvlab.pictures import PathPicture
path = PathPicture({"engine": "tokens computed", "pool": "tokens found"})
path.note("question", {"engine": 401, "pool": 0})
path.note("follow-up", {"engine": 65, "pool": 384})
path
"""


def test_the_map_goes_through_events_by_keyboard_and_by_mouse(page, course):
    cell = _chapter(page, course, "06_the_map", "PathPicture")
    _retype(page, cell, EVENTS)
    picture = cell.locator(".widget-html svg[role=img]")
    lit = picture.locator('rect[rx][fill="#1f5fa8"]')
    expect = sync_api.expect(picture).to_have_attribute
    expect("aria-label", re.compile("event 2 of 2: .* 65 tokens computed; .* 384 tokens found"))
    sync_api.expect(lit).to_have_count(2)
    cell.locator(".noUi-handle").press("ArrowLeft")
    expect("aria-label", re.compile("event 1 of 2: .* 401 tokens computed; .* 0 tokens found"))
    sync_api.expect(lit).to_have_count(1)
    track = cell.locator(".noUi-target")
    track.click(position={"x": track.bounding_box()["width"] - 2, "y": 2})
    expect("aria-label", re.compile("event 2 of 2"))
    sync_api.expect(lit).to_have_count(2)
    _picture(page, "chapter-06")
    assert page.elsewhere == []
