"""The map lights what moved, in shapes and in words; counters are read as differences."""

import xml.etree.ElementTree as ElementTree

import pytest

from kvlab import environments, follow, systems
from kvlab.engines.protocol import EngineError
from kvlab.follow import Watch
from kvlab.pictures import PathPicture, path_svg
from kvlab.pictures.path import EDGES, PLACES, alternative

SVG = "{http://www.w3.org/2000/svg}"
UNITS = {
    "engine": "tokens computed",
    "pool": "tokens found",
    "connector": "tokens brought",
    "cache": ("chunks written", "tokens offered"),
}


def boxes(svg):
    """The fill and the outline of each place, in the order of PLACES."""
    found = ElementTree.fromstring(svg).findall(f"{SVG}rect")
    return dict(zip(PLACES, found[1:], strict=False))  # the first one is the card


def test_a_place_is_filled_framed_or_dashed():
    shown = boxes(path_svg(UNITS, {"engine": 129, "pool": 0, "cache": (0, 2944)}))
    fills = {key: box.get("fill") for key, box in shown.items()}
    assert fills["engine"] == fills["cache"] == "#1f5fa8"
    assert fills["pool"] == fills["store"] == "#ffffff"
    assert shown["pool"].get("stroke-dasharray") is None
    assert shown["store"].get("stroke-dasharray")


@pytest.mark.parametrize(
    ("counts", "thick"),
    [
        ({"engine": 401, "cache": (0, 0)}, 1),
        ({"engine": 65, "cache": (0, 384)}, 2),
        ({"engine": 65, "connector": 384, "cache": (0, 384)}, 3),
        ({"cache": (3, 0)}, 1),
        ({}, 0),
    ],
)
def test_a_line_lights_with_the_place_it_leads_to(counts, thick):
    lines = ElementTree.fromstring(path_svg(UNITS, counts)).findall(f"{SVG}line")
    assert sum(line.get("stroke-width") == "4" for line in lines) == thick


def test_router_and_mover_reach_both_engines_and_lines_join_neighbours():
    units = dict.fromkeys(("router", "engine", "pool", "mover", "second engine", "second pool"), "")
    lines = ElementTree.fromstring(path_svg(units, {"router": 2, "mover": 9})).findall(f"{SVG}line")
    assert sum(line.get("stroke-width") == "4" for line in lines) == 4
    for one, other in ((PLACES[one], PLACES[other]) for one, other in EDGES):
        assert abs(one.column - other.column) + abs(one.row - other.row) == 1


def test_words_say_the_numbers_and_nothing_lies_outside():
    counts = {"engine": 129, "pool": 0, "connector": 2944, "cache": (1, 2944)}
    said = alternative(UNITS, counts, "chunk 23 missing", {"engine": "vLLM"})
    assert said == (
        "chunk 23 missing: vLLM 129 tokens computed; pool on its device 0 tokens found; "
        "vLLM's connector 2,944 tokens brought; "
        "LMCache: host 1 chunk written and 2,944 tokens offered."
    )
    root = ElementTree.fromstring(
        path_svg(UNITS, counts, title="chunk 23 missing", names={"engine": "vLLM"})
    )
    assert root.get("aria-label") == said
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.findall(f"{SVG}rect"):
        assert float(shape.get("x", 0)) + float(shape.get("width")) <= width
        assert float(shape.get("y", 0)) + float(shape.get("height")) <= height


def test_a_place_that_counts_nothing_says_so():
    units = {"pool": "tokens found", "mover": ()}
    assert alternative(units, {"pool": 1}).endswith("NIXL, Transfer Engine no count of its own.")
    shown = boxes(path_svg(units, {"pool": 1}))["mover"]
    assert (shown.get("fill"), shown.get("stroke-dasharray")) == ("#ffffff", None)
    path = PathPicture(units)
    path.note("question", {"pool": 1})
    assert "no count" not in path.told()


def test_nothing_is_lit_before_the_first_event():
    assert "nothing lit" in alternative({}, {})
    shown = boxes(path_svg({}, {}))
    assert all(box.get("stroke-dasharray") for key, box in shown.items() if key in PLACES)


def test_events_can_be_gone_through_and_a_static_page_has_the_last():
    path = PathPicture(UNITS, names={"engine": "vLLM"}, title="LMCache")
    assert "nothing lit" in path._repr_mimebundle_()["text/plain"]
    path.note("question", {"engine": 401, "pool": 0, "cache": (3, 0)})
    path.note("follow-up", {"engine": 65, "pool": 384, "cache": (0, 0)})
    assert "event 2 of 2: follow-up" in path._picture.value
    bundle = path._repr_mimebundle_()
    assert bundle["text/plain"].startswith("LMCache, event 2 of 2: follow-up: vLLM 65 tokens")
    assert path.told() == "    vLLM 65 tokens computed; pool on its device 384 tokens found"
    path.event.value = 1
    assert path._repr_mimebundle_()["image/svg+xml"] != bundle["image/svg+xml"]
    with pytest.raises(KeyError, match="no 'cloud'"):
        PathPicture({"cloud": "tokens"})


class Counters:
    def __init__(self):
        self.page = {}

    def metrics(self):
        return dict(self.page)


def test_counters_are_differences_with_labels_added_up():
    system = Counters()
    watch = Watch({"engine": (system, "n"), "cache": ((system, "hits"), (system, 'hits{s="a"}'))})
    system.page = {"n": 5.0, 'hits{s="a"}': 2.0, 'hits{s="b"}': 3.0}
    assert watch.moved() == {"engine": 5, "cache": (5, 2)}
    system.page['hits{s="b"}'] = 4.0
    assert watch.moved() == {"engine": 0, "cache": (1, 0)}
    scaled = Watch({"mover": (system, "mb", 1 << 20)})
    system.page["mb"] = 1.625
    assert scaled.moved() == {"mover": 1_703_936}
    system.page = {"mb": 0.5}
    with pytest.raises(EngineError, match="'mover' went back from 1,703,936 to 524,288"):
        scaled.moved()
    system.page = {"mb": 1.5}  # and from there on it counts
    assert scaled.moved() == {"mover": 1 << 20}


def test_what_is_missing_is_filled_in_and_marked(capsys, monkeypatch):
    def missing():
        raise environments.EnvironmentMissing("There is no SGLang: more")

    seen = follow.live("HiCache", missing)
    printed = capsys.readouterr().out
    assert "NOT RUN HERE: There is no SGLang\n" in printed
    recorded = systems.seen_on("cpu")["HiCache"]
    assert recorded["version"] in printed
    assert seen == {**recorded["seen"], "recorded": True}
    monkeypatch.setattr(follow.memory, "available", lambda: 1 << 30)
    assert follow.live("HiCache", lambda: {"first": 1}, gb=3)["recorded"]
    assert "it wants 3 GB of free memory" in capsys.readouterr().out
    assert follow.live("HiCache", lambda: {"first": 1}, gb=1) == {"first": 1}


def test_the_table_holds_for_what_was_recorded_alone():
    recorded = {
        name: {**found["seen"], "recorded": True} for name, found in systems.seen_on("cpu").items()
    }
    text = follow.table(recorded)
    assert text.count("(recorded, not run here)") == text.count("\n") - 1 == 9
    assert "14 objects after vLLM's end" in text
    assert "401 bytes, the same: True" in text
    live = {**recorded, "LMCache": {"follow_up": 384, "after_reset": 384}}
    assert follow.table(live).count("not run here") == 8
