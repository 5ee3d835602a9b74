"""Who ran in which step, and with how many tokens: a scheduler's steps as a timetable.

Drawn from `minikv.trace.Step`s, whoever's scheduler made them (minikv's, vLLM's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets

from kvlab.pictures import svg
from minikv.trace import Arrival, Step, dry_run

COLUMN, ROW = 30, 22
_LEFT, _TOP, _MARGIN, _BAR = 90, 30, 14, 46
WINDOW = 24
"""Steps in sight: the picture stays as wide, and as quick to draw, however many there are."""


def timeline_svg(steps: Sequence[Step], budget: int, now: int | None = None) -> str:
    """A row for each request, a column for each step, and above them the token budget.

    A solid field with a number is prefill of so many tokens, a framed one a decode (one token),
    a dashed line a request that waits, a cross one that was preempted. The column of step `now`
    (a place in `steps`, by default the last) is framed; `WINDOW` columns around it are shown.
    """
    now = len(steps) - 1 if now is None else now
    first = min(max(0, now - WINDOW // 2), max(0, len(steps) - WINDOW))
    shown = steps[first : first + WINDOW]
    rows = _rows(steps)
    left = max(_LEFT, 24 + 7 * max((len(name) for name in rows), default=0))
    rows_top = _TOP + _BAR + 22
    width = left + WINDOW * COLUMN + _MARGIN
    height = rows_top + len(rows) * ROW + 50
    body = [
        svg.text(_MARGIN, _TOP + 12, "token"),
        svg.text(_MARGIN, _TOP + 26, f"budget {budget}", size=11),
        svg.text(_MARGIN, rows_top - 6, "step", size=11),
    ]
    if not steps:
        body.append(svg.text(left, rows_top + 14, "no requests"))
        return svg.card(width, height, "".join(body), alternative(steps, budget, now))
    for y in (_TOP, _TOP + _BAR):
        body.append(_line(left, y, left + WINDOW * COLUMN, y, svg.FAINT))
    for column, step in enumerate(shown):
        x = left + column * COLUMN
        top = float(_TOP + _BAR)
        for kind, fill in ((step.prefill, svg.COMPUTED), (step.decode, "#ffffff")):
            if kind:
                tall = _BAR * sum(kind.values()) / budget
                top -= tall
                body.append(_rect(x + 4, top, COLUMN - 8, tall, fill))
        body.append(
            svg.text(x + COLUMN / 2, rows_top - 6, str(step.index + 1), size=11, anchor="middle")
        )
        for row, name in enumerate(rows):
            body.append(_field(step, name, x, rows_top + row * ROW))
    for row, name in enumerate(rows):
        body.append(svg.text(_MARGIN, rows_top + row * ROW + 15, name, size=11))
    x = left + (now - first) * COLUMN
    tall = rows_top - _TOP + 6 + len(rows) * ROW
    body.append(
        f'<rect x="{x:g}" y="{_TOP - 6}" width="{COLUMN}" height="{tall}" fill="none" '
        f'stroke="{svg.INK}" stroke-width="2" stroke-dasharray="5 3"/>'
    )
    body.append(_legend(_MARGIN, height - 16))
    return svg.card(width, height, "".join(body), alternative(steps, budget, now))


def alternative(steps: Sequence[Step], budget: int, now: int | None = None) -> str:
    """What the picture says of step `now`, and of all, in words."""
    if not steps:
        return "No requests, so no steps."
    step = steps[len(steps) - 1 if now is None else now]
    said = [f"Step {step.index + 1} of {steps[-1].index + 1}, budget {budget} tokens."]
    for words, given in (("Prefill", step.prefill), ("Decode", step.decode)):
        if given:
            parts = ", ".join(f"{name} {count}" for name, count in given.items())
            said.append(f"{words}: {parts}.")
    said.append(f"Used: {sum(step.tokens.values())}.")
    for words, names in (("Waiting", step.waiting), ("Preempted", step.preempted)):
        if names:
            said.append(f"{words}: {', '.join(names)}.")
    preemptions = sum(len(step.preempted) for step in steps)
    said.append(f"Preemptions in all steps: {preemptions}.")
    return " ".join(said)


def _rows(steps: Sequence[Step]) -> list[str]:
    """Requests in the order in which they are first seen."""
    seen: dict[str, None] = {}
    for step in steps:
        seen |= dict.fromkeys([*step.prefill, *step.decode, *step.waiting])
    return list(seen)


def _field(step: Step, name: str, x: float, y: float) -> str:
    """What step does with one request, as a field of the timetable."""
    if name in step.prefill:
        count = step.prefill[name]
        size = 11 if count < 1000 else 9
        label = (
            f'<text x="{x + COLUMN / 2:g}" y="{y + 15:g}" font-size="{size}" '
            f'text-anchor="middle" fill="#ffffff" {svg.FONT}>{count}</text>'
        )
        return _rect(x + 1, y + 2, COLUMN - 2, ROW - 4, svg.COMPUTED) + label
    if name in step.decode:
        return _rect(x + 8, y + 4, COLUMN - 16, ROW - 8, "#ffffff")
    if name in step.preempted:
        return _cross(x + COLUMN / 2, y + ROW / 2)
    if name in step.waiting:
        return _line(x + 3, y + ROW / 2, x + COLUMN - 3, y + ROW / 2, svg.INK, dashed=True)
    return ""


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:.1f}" width="{width:g}" height="{height:.1f}" fill="{fill}" '
        f'stroke="{svg.INK}"/>'
    )


def _line(x: float, y: float, x2: float, y2: float, stroke: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="2 3"' if dashed else ""
    return f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}"{dash}/>'


def _cross(x: float, y: float) -> str:
    return _line(x - 6, y - 6, x + 6, y + 6, svg.INK) + _line(x - 6, y + 6, x + 6, y - 6, svg.INK)


def _legend(x: float, y: float) -> str:
    return "".join(
        [
            _rect(x, y - 10, 16, 12, svg.COMPUTED),
            svg.text(x + 22, y, "prefill: so many tokens, first or again", size=11),
            _rect(x + 316, y - 10, 16, 12, "#ffffff"),
            svg.text(x + 338, y, "decode: one token", size=11),
            _line(x + 452, y - 4, x + 474, y - 4, svg.INK, dashed=True),
            svg.text(x + 480, y, "waiting", size=11),
            _cross(x + 546, y - 4),
            svg.text(x + 560, y, "preempted", size=11),
        ]
    )


class Timeline(ipywidgets.VBox):  # type: ignore[misc]
    """The timetable with a slider and a play button for the step, and the scheduler's settings.

    arrivals, settings: as for `minikv.trace.dry_run`, which is run anew at each change. A
    setting with which the requests cannot be run is told below the sliders.
    """

    def __init__(self, arrivals: Sequence[Arrival], *, now: int = 0, **settings: Any) -> None:
        self._arrivals, self._settings = list(arrivals), dict(settings)
        largest = max(256, 2 * settings.get("max_num_batched_tokens", 128))
        common = {"continuous_update": True, "layout": ipywidgets.Layout(width="340px")}
        self.budget = ipywidgets.IntSlider(
            settings.get("max_num_batched_tokens", 128), 1, largest, description="budget", **common
        )
        self.threshold = ipywidgets.IntSlider(
            settings.get("long_prefill_token_threshold", 0),
            *(0, largest),
            description="threshold",
            **common,
        )
        self.policy = ipywidgets.ToggleButtons(
            options=["fcfs", "priority"],
            value=settings.get("policy", "fcfs"),
            description="policy",
            style={"button_width": "80px"},
        )
        self.step = ipywidgets.IntSlider(now + 1, 1, now + 1, description="step", **common)
        self._play = ipywidgets.Play(value=now + 1, min=1, max=now + 1, interval=700)
        ipywidgets.jslink((self._play, "value"), (self.step, "value"))
        self._said = ipywidgets.HTML()
        self._picture = ipywidgets.HTML()
        self._run()
        for setting in (self.budget, self.threshold, self.policy):
            setting.observe(self._run, "value")
        self.step.observe(self._draw, "value")
        super().__init__(
            [
                ipywidgets.HBox([self.budget, self.threshold]),
                ipywidgets.HBox([self.step, self._play, self.policy]),
                self._said,
                self._picture,
            ]
        )

    def _run(self, _change: Any = None) -> None:
        """Schedule with the settings that the sliders have now."""
        self._settings |= {
            "max_num_batched_tokens": self.budget.value,
            "long_prefill_token_threshold": self.threshold.value,
            "policy": self.policy.value,
        }
        try:
            self.steps = dry_run(self._arrivals, **self._settings)
            self._said.value = ""
        except (ValueError, RuntimeError) as error:
            self.steps = []
            self._said.value = f"<p>{escape(str(error))}</p>"
        self.step.max = self._play.max = max(1, len(self.steps))
        self._draw()

    def _draw(self, _change: Any = None) -> None:
        self._picture.value = self._svg()

    def _svg(self) -> str:
        return timeline_svg(self.steps, self.budget.value, self.step.value - 1)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget for a live page, its SVG and words for every other reader."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        return {
            **bundle,
            "image/svg+xml": self._svg(),
            "text/plain": alternative(self.steps, self.budget.value, self.step.value - 1),
        }
