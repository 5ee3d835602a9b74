"""The map of the systems, and which of its places a request lit up.

A place is a part of a system that can compute, keep or move KV. What it reported is a number: a
place whose number moved is filled, one that was asked and has 0 is framed, one that is not in this
set-up is dashed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

import ipywidgets

from kvlab.pictures import svg

_WIDTH, _HEIGHT = 764, 452
_TALL = 76
_COLUMNS = ((16, 152), (184, 180), (380, 176), (572, 176))
_ROWS = (40, 140, 240, 340)


class Place(NamedTuple):
    name: str
    does: str
    """What it is there for: decide, consume, own, move."""
    column: int
    row: int


PLACES = {
    "router": Place("router", "decides: where", 2, 0),
    "engine": Place("engine", "decides, consumes", 1, 0),
    "pool": Place("pool on its device", "owns", 1, 1),
    "mover": Place("NIXL, Transfer Engine", "moves", 2, 1),
    "second engine": Place("second engine", "decides, consumes", 3, 0),
    "second pool": Place("second pool", "owns", 3, 1),
    "connector": Place("vLLM's connector", "decides: what to load; moves", 1, 2),
    "host tier": Place("HiCache: host", "decides, owns, moves", 0, 1),
    "host tier files": Place("HiCache: files", "owns", 0, 2),
    "cache": Place("LMCache: host", "decides, owns, moves", 1, 3),
    "cache files": Place("LMCache: files", "owns", 0, 3),
    "store": Place("Mooncake Store", "owns, decides: where", 2, 2),
}
# Each pair, neighbours on the map: a line between them lights when the second one's count moved.
EDGES = (
    ("engine", "router"),
    ("second engine", "router"),
    ("pool", "engine"),
    ("second pool", "second engine"),
    ("pool", "mover"),
    ("second pool", "mover"),
    ("mover", "store"),
    ("pool", "host tier"),
    ("host tier", "host tier files"),
    ("pool", "connector"),
    ("connector", "cache"),
    ("connector", "store"),
    ("cache", "cache files"),
)

Unit = str | tuple[str, ...]
Count = int | tuple[int, ...]


def path_svg(
    units: Mapping[str, Unit],
    counts: Mapping[str, Count],
    *,
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> str:
    """The map after one event.

    units: what each place of this set-up counts ({"pool": "tokens found"}), or a tuple of such,
    which is empty where nothing counts; counts: how far those counts moved, in the same form;
    names: what a place is called here ({"engine": "vLLM"}).
    """
    names = names or {}
    body = [svg.text(16, 26, title or "The map: what can keep, move and use the KV of a prompt")]
    for one, other in EDGES:
        lit = one in units and other in units and _moved(counts, other)
        body.append(_edge(PLACES[one], PLACES[other], lit))
    for key, place in PLACES.items():
        name, said = names.get(key, place.name), _said(key, units, counts)
        body.append(_box(place, name, said, key in units, _moved(counts, key)))
    body.append(_legend())
    return svg.card(_WIDTH, _HEIGHT, "".join(body), alternative(units, counts, title, names))


def alternative(
    units: Mapping[str, Unit],
    counts: Mapping[str, Count],
    title: str = "",
    names: Mapping[str, str] | None = None,
) -> str:
    """What the picture says, in words."""
    names = names or {}
    if not counts:
        here = [place for key, place in PLACES.items() if key in units or not units]
        said = "; ".join(f"{place.name} ({place.does})" for place in here)
        return f"{title or 'The map'}, nothing lit: {said}."
    parts = [
        f"{names.get(key, PLACES[key].name)} {' and '.join(_said(key, units, counts))}"
        for key in PLACES
        if key in units
    ]
    return f"{title}: " * bool(title) + "; ".join(parts) + "."


def _moved(counts: Mapping[str, Count], key: str) -> bool:
    count = counts.get(key, 0)
    return any(count) if isinstance(count, tuple) else bool(count)


def _said(
    key: str, units: Mapping[str, Unit], counts: Mapping[str, Count], *, zeros: bool = True
) -> list[str]:
    """What a place counted, a line for each of its units; nothing before the first event."""
    if key not in units or not counts:
        return []
    if units[key] == ():
        return ["no count of its own"] if zeros else []
    unit, count = units[key], counts.get(key, 0)
    several = unit if isinstance(unit, tuple) else (unit,)
    numbers = count if isinstance(count, tuple) else (count,) * len(several)
    return [
        f"{number:,} {words if number != 1 else _singular(words)}"
        for words, number in zip(several, numbers, strict=True)
        if number or zeros
    ]


def _singular(words: str) -> str:
    """The words for one: "token found" of "tokens found"."""
    first, _, rest = words.partition(" ")
    return f"{first.removesuffix('s')} {rest}".strip()


def _corner(place: Place) -> tuple[int, int, int]:
    left, wide = _COLUMNS[place.column]
    return left, _ROWS[place.row], wide


def _box(place: Place, name: str, said: list[str], here: bool, lit: bool) -> str:
    x, y, wide = _corner(place)
    ink = "#ffffff" if lit else svg.INK if here else "#5f5f5f"
    line = f'stroke="{svg.INK}"' if here else f'stroke="{svg.FAINT}" stroke-dasharray="4 3"'
    parts = [
        f'<rect x="{x}" y="{y}" width="{wide}" height="{_TALL}" rx="4" '
        f'fill="{svg.COMPUTED if lit else "#ffffff"}" {line}/>'
    ]
    lines = [(17, 12, name, 600), (32, 11, place.does, 400)]
    lines += [(50 + 17 * row, 12, words, 600) for row, words in enumerate(said)]
    for down, size, words, weight in lines:
        parts.append(
            f'<text x="{x + 9}" y="{y + down}" font-size="{size}" font-weight="{weight}" '
            f'fill="{ink}" {svg.FONT}>{escape(words)}</text>'
        )
    return "".join(parts)


def _edge(one: Place, other: Place, lit: bool) -> str:
    """A line between two neighbours, from side to side."""
    if (one.row, one.column) > (other.row, other.column):
        one, other = other, one
    (x, y, wide), (x2, y2, _) = _corner(one), _corner(other)
    if one.row == other.row:
        ends = (x + wide, y + _TALL // 2, x2, y + _TALL // 2)
    else:
        ends = (x + wide // 2, y + _TALL, x + wide // 2, y2)
    style = (
        f'stroke="{svg.INK}" stroke-width="4"'
        if lit
        else f'stroke="{svg.FAINT}" stroke-dasharray="4 3"'
    )
    return '<line x1="{}" y1="{}" x2="{}" y2="{}" {}/>'.format(*ends, style)


def _legend() -> str:
    y, parts = _HEIGHT - 9, []
    for x, fill, line, label in (
        (16, svg.COMPUTED, svg.INK, "its count moved"),
        (150, "#ffffff", svg.INK, "in this set-up, its count did not move"),
        (410, "#ffffff", svg.FAINT, "not in this set-up"),
    ):
        dash = ' stroke-dasharray="4 3"' if line == svg.FAINT else ""
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{fill}" '
            f'stroke="{line}"{dash}/>' + svg.text(x + 20, y, label, size=11)
        )
    return "".join(parts)


class PathPicture(ipywidgets.VBox):  # type: ignore[misc]
    """The map with a slider and a play button for the events of one run.

    units, names: as for `path_svg`. `note` adds an event and shows it at once, so that a picture
    that was displayed before lights up while the engine runs.
    """

    def __init__(
        self,
        units: Mapping[str, Unit] | None = None,
        *,
        names: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        units = units or {}
        unknown = set(units) - set(PLACES)
        if unknown:
            raise KeyError(f"the map has no {sorted(unknown)[0]!r}; it has {', '.join(PLACES)}")
        self._units, self._names, self._title = dict(units), dict(names or {}), title
        self.events: list[tuple[str, dict[str, Count]]] = []
        self.event = ipywidgets.IntSlider(1, 1, 1, description="event")
        self._play = ipywidgets.Play(value=1, min=1, max=1, interval=1500)
        ipywidgets.jslink((self._play, "value"), (self.event, "value"))
        self._picture = ipywidgets.HTML()
        self.event.observe(self._draw, "value")
        self._draw()
        super().__init__([ipywidgets.HBox([self.event, self._play]), self._picture])

    def note(self, event: str, counts: Mapping[str, Count]) -> None:
        """One event more, and how far each place's count moved in it."""
        self.events.append((event, dict(counts)))
        self.event.max = self._play.max = len(self.events)
        self.event.value = len(self.events)
        self._draw()

    def _now(self) -> tuple[str, dict[str, Count]]:
        if not self.events:
            return self._title, {}
        event, counts = self.events[self.event.value - 1]
        number = f"event {self.event.value} of {len(self.events)}"
        return f"{self._title}, {number}: {event}" if self._title else f"{number}: {event}", counts

    def told(self) -> str:
        """What moved in the last event, in words, in lines that fit a narrow page."""
        _, counts = self.events[-1]
        parts = [
            f"{self._names.get(key, PLACES[key].name)} {' and '.join(said)}"
            for key in PLACES
            if (said := _said(key, self._units, counts, zeros=False))
        ]
        return textwrap.indent(textwrap.fill("; ".join(parts), 72), "    ")

    def _draw(self, _change: Any = None) -> None:
        self._picture.value = self._svg()

    def _svg(self) -> str:
        title, counts = self._now()
        return path_svg(self._units, counts, title=title, names=self._names)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget for a live page, its SVG and words for every other reader."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        title, counts = self._now()
        return {
            **bundle,
            "image/svg+xml": self._svg(),
            "text/plain": alternative(self._units, counts, title, self._names),
        }
