"""Pictures say what the model does, in shapes and in words."""

import xml.etree.ElementTree as ElementTree

import pytest

from kvlab.pictures import ForwardsPicture, forwards_svg
from kvlab.pictures.forwards import token_forwards

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("prompt", "output"), [(8, 6), (1, 1), (24, 16), (100, 20)])
def test_cells_are_the_token_forwards(prompt, output):
    root = ElementTree.fromstring(forwards_svg(prompt, output))
    cells = [r for r in root.iter(f"{SVG}rect") if r.get("stroke") == "#1a1a1a"]
    computed = [r for r in cells if r.get("fill") == "#1f5fa8"]
    kept = [r for r in cells if r.get("fill") == "url(#hatch)"]
    without = sum(token_forwards(prompt, output, cache=False))
    with_cache = sum(token_forwards(prompt, output, cache=True))
    legend = 1
    assert len(computed) == without + with_cache + legend
    assert len(kept) == without - with_cache + legend


def test_counts_of_the_chapter():
    assert sum(token_forwards(100, 20, cache=False)) == 2190
    assert sum(token_forwards(100, 20, cache=True)) == 119


def test_text_alternative_says_the_numbers():
    root = ElementTree.fromstring(forwards_svg(100, 20))
    assert root.get("role") == "img"
    assert "2190 token-forwards" in root.get("aria-label")
    assert "119 token-forwards" in root.get("aria-label")


def test_nothing_lies_outside_the_card():
    root = ElementTree.fromstring(forwards_svg(24, 16))
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.findall(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width")) <= width
        assert float(shape.get("y", 0)) + float(shape.get("height")) <= height


def test_slider_redraws_and_a_static_page_has_the_svg():
    picture = ForwardsPicture(8, 6)
    before = picture._repr_mimebundle_()["image/svg+xml"]
    picture.output.value = 7
    after = picture._repr_mimebundle_()["image/svg+xml"]
    assert before != after
    assert after == forwards_svg(8, 7)
