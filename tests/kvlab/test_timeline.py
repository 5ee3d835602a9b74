"""The timetable shows the steps as they were, in shapes and in words, and is quick."""

import time
import xml.etree.ElementTree as ElementTree

import pytest

from kvlab.pictures import Timeline, timeline_svg
from kvlab.pictures.timeline import WINDOW, alternative
from minikv.trace import Arrival, dry_run

SVG = "{http://www.w3.org/2000/svg}"
TWO = [Arrival(id="long", prompt=1000, output=1), Arrival(id="short", prompt=20, output=4)]
SETTINGS = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 64}
# Two requests that together need more blocks than there are: one is preempted.
TIGHT = [Arrival(id=name, prompt=24, output=16) for name in "ab"]


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_chunks_have_their_numbers():
    steps = dry_run(TWO, **SETTINGS)
    shown = texts(timeline_svg(steps, 128))
    given = [str(count) for step in steps for count in step.prefill.values()]
    assert [text for text in shown if text in ("20", "64", "104", "128")] == given
    assert {"long", "short", "budget 128", *map(str, range(1, 11))} <= set(shown)


def test_a_preempted_request_is_crossed_and_told():
    steps = dry_run(TIGHT, num_blocks=5, block_size=16)
    (at,) = (place for place, step in enumerate(steps) if step.preempted)
    assert "Preempted: b." in alternative(steps, 2048, at)
    crossed = ElementTree.fromstring(timeline_svg(steps, 2048)).findall(f"{SVG}line")
    slanted = [e for e in crossed if e.get("x1") != e.get("x2") and e.get("y1") != e.get("y2")]
    assert len(slanted) == 2 * (1 + 1)  # the cross of b and that of the legend


def test_words_say_what_the_step_does():
    steps = dry_run(TWO, **SETTINGS)
    said = alternative(steps, 128, 1)
    assert said.startswith("Step 2 of 10, budget 128 tokens. Prefill: long 64. Decode: short")
    assert "Used: 65." in said
    svg = ElementTree.fromstring(timeline_svg(steps, 128, 1))
    assert svg.get("aria-label") == said


@pytest.mark.parametrize("now", [0, 5, 200, None])
def test_the_window_holds_the_step_and_nothing_lies_outside(now):
    many = [Arrival(id=f"r{n}", prompt=30 + n, output=60, step=3 * n) for n in range(64)]
    steps = dry_run(many, max_num_batched_tokens=48, num_blocks=300)
    svg = timeline_svg(steps, 48, now)
    shown = [int(text) for text in texts(svg)[3:] if text and text.isdigit()]
    assert (len(steps) if now is None else now + 1) in shown
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.findall(f"{SVG}rect"):
        assert 0 <= float(shape.get("x", 0)) <= width - float(shape.get("width"))
        assert 0 <= float(shape.get("y", 0)) <= height - float(shape.get("height")) + 0.1


def test_a_long_run_is_as_quick_to_draw(capsys):
    """64 requests and more than 500 steps; the time is reported, not asserted."""
    many = [Arrival(id=f"r{n}", prompt=100, output=100, step=7 * n) for n in range(64)]
    steps = dry_run(many, max_num_batched_tokens=64)
    assert len(steps) > 500
    began = time.perf_counter()
    svg = timeline_svg(steps, 64, 250)
    with capsys.disabled():
        print(f"\n{len(steps)} steps drawn in {(time.perf_counter() - began) * 1000:.0f} ms")
    assert len(ElementTree.fromstring(svg).findall(f"{SVG}rect")) < 64 * WINDOW + 3 * WINDOW + 10


def test_sliders_schedule_anew_and_a_static_page_has_the_svg():
    picture = Timeline(TWO, **SETTINGS)
    assert len(picture.steps) == 10
    picture.threshold.value = 0
    assert len(picture.steps) == 11
    picture.step.value = 8
    bundle = picture._repr_mimebundle_()
    assert bundle["image/svg+xml"] == timeline_svg(picture.steps, 128, 7)
    assert bundle["text/plain"].startswith("Step 8 of 11, budget 128")
    assert 'aria-label="Step 8 of 11' in picture._picture.value


def test_settings_that_cannot_be_run_are_told():
    picture = Timeline(TWO, num_blocks=5, **SETTINGS)
    assert "has 1000 + 1 tokens" in picture._said.value
    assert "no requests" in picture._picture.value
