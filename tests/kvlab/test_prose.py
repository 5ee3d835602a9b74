"""A number with a unit has its origin beside it: a result file, arithmetic, or a source."""

import re

import pytest

from kvlab import notebooks
from kvlab.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = sorted(
    path for part in ("chapters", "labs", "solutions") for path in (ROOT / part).glob("*.ipynb")
)
UNIT = (
    r"ms|µs|s|seconds?|minutes?|hours?|[KMGT]i?B|tokens/s|requests/s|req/s|%|"
    r"(?:x|times) (?:faster|slower)"
)
FIGURE = re.compile(rf"(?<![\w.,])\d[\d,.]*\s?(?:{UNIT})(?!\w)")
# What says where a figure of the same paragraph comes from.
ORIGIN = re.compile(
    r"[=×]|\\times|\\cdot"  # arithmetic that the reader can redo
    r"|\]\(http|#\d{2,}|`[\w./]+\.(?:py|json)`"  # a page, an issue, a file
)
# What an author decides or asks for, and does not measure.
DECIDED = re.compile(
    r"\((?:predict|measure|build|break|explain), \d+ minutes\)"
    r"|^(?:About )?\d+ (?:to \d+ )?minutes\b"
    r"|[Nn]eeds \d+ GB|wants\s+\d+ GB",
    re.MULTILINE,
)


def without_origin(text):
    """Figures in a Markdown text that come from nowhere."""
    text = re.sub(r"```.*?```|`[^`]*\d[^`]*`", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- results/.*?<!-- / -->", "", text, flags=re.DOTALL)
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not ORIGIN.search(paragraph):
            found += FIGURE.findall(DECIDED.sub("", paragraph))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages(path):
    assert without_origin(path.read_text()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_notebooks(path):
    cells = [
        cell
        for cell in notebooks.read(path).cells
        # An exercise's own text sets its premises ("a step takes 50 ms").
        if cell.cell_type == "markdown" and not re.match(r"## \d\d\.\d+ ", cell.source)
    ]
    assert {cell.id: found for cell in cells if (found := without_origin(cell.source))} == {}


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("A step takes 25 ms.", ["25 ms"]),
        ("It is 3 times faster, and saves 40% of 12 GB.", ["3 times faster", "40%", "12 GB"]),
        ("2 x 30 x 3 x 64 x 2 = 23,040 bytes, 22.5 KiB.", []),
        ("It took 25 ms ([vllm #57413](https://example.org)).", []),
        ("Measured.\n\nA step takes 25 ms. [elsewhere](x.md)", ["25 ms"]),
        ("`<!-- results/x.json a -->` <!-- results/x.json a -->25 ms<!-- / -->", []),
        ("## 01.1 Who runs (predict, 5 minutes)", []),
        ("Needs 4 GB of free memory.", []),
        ("`sleep(25 ms)` and 100 tokens, 3 steps", []),
    ],
)
def test_the_test_itself(text, figures):
    assert without_origin(text) == figures
