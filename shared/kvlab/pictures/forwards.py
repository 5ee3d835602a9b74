"""Which tokens go through the model in which pass, without and with a KV cache."""

from __future__ import annotations

from typing import Any

import ipywidgets

from kvlab.pictures import svg

_MARGIN = 16
_LABEL = 58
_PANEL_WIDTH = 420


def token_forwards(prompt: int, output: int, *, cache: bool) -> list[int]:
    """Tokens that each pass computes, for `prompt` and `output` tokens.

    Without a cache a pass takes the whole sequence so far; with one, the first
    pass takes the prompt and every later pass the token sampled last.
    """
    if cache:
        return [prompt] + [1] * (output - 1)
    return [prompt + step for step in range(output)]


def forwards_svg(prompt: int = 8, output: int = 6) -> str:
    """The picture: a row for each pass, a cell for each token that is its input.

    A solid cell is computed in this pass, a hatched one is kept from an earlier
    pass, the circle is the token that the pass samples.
    """
    cell = min(16.0, (_PANEL_WIDTH - _LABEL) / (prompt + output))
    panel_height = 44 + output * (cell + 3)
    body = []
    for panel, cache in enumerate((False, True)):
        computed = token_forwards(prompt, output, cache=cache)
        top = _MARGIN + panel * (panel_height + 14)
        name = "With a KV cache" if cache else "Without a KV cache"
        body.append(svg.text(_MARGIN, top + 14, f"{name}: {_sum(computed)} token-forwards"))
        for step, now in enumerate(computed):
            y = top + 26 + step * (cell + 3)
            length = prompt + step
            body.append(svg.text(_MARGIN, y + cell - 3, f"pass {step + 1}", size=10))
            for position in range(length):
                x = _MARGIN + _LABEL + position * cell
                fill = svg.COMPUTED if position >= length - now else "url(#hatch)"
                body.append(
                    f'<rect x="{x:.2f}" y="{y:.2f}" width="{cell - 2:.2f}" '
                    f'height="{cell - 2:.2f}" fill="{fill}" stroke="{svg.INK}"/>'
                )
            body.append(
                f'<circle cx="{_MARGIN + _LABEL + length * cell + cell / 2 - 1:.2f}" '
                f'cy="{y + cell / 2 - 1:.2f}" r="{cell / 2 - 2:.2f}" fill="#ffffff" '
                f'stroke="{svg.INK}"/>'
            )
    legend_y = _MARGIN + 2 * (panel_height + 14) + 4
    body.append(_legend(legend_y))
    width = 2 * _MARGIN + _LABEL + max(_PANEL_WIDTH - _LABEL, (prompt + output) * cell)
    return svg.card(width, legend_y + 16, "".join(body), alternative(prompt, output))


def alternative(prompt: int, output: int) -> str:
    """What the picture says, in words."""
    without = token_forwards(prompt, output, cache=False)
    with_cache = token_forwards(prompt, output, cache=True)
    return (
        f"A request of {prompt} prompt tokens that generates {output}, in {output} passes. "
        f"Without a KV cache pass 1 computes {without[0]} tokens and pass {output} computes "
        f"{without[-1]}: {sum(without)} token-forwards. With a KV cache pass 1 computes "
        f"{with_cache[0]} tokens and every later pass 1: {sum(with_cache)} token-forwards. "
        "The last sampled token is never an input."
    )


def _sum(parts: list[int]) -> str:
    if len(parts) > 4:
        shown = [*map(str, parts[:3]), "...", str(parts[-1])]
    else:
        shown = [*map(str, parts)]
    return f"{' + '.join(shown)} = {sum(parts):,}"


def _legend(y: float) -> str:
    parts = []
    for x, fill, label in (
        (_MARGIN, svg.COMPUTED, "computed in this pass"),
        (_MARGIN + 160, "url(#hatch)", "KV kept from an earlier pass"),
    ):
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{fill}" stroke="{svg.INK}"/>'
        )
        parts.append(svg.text(x + 17, y, label, size=11))
    x = _MARGIN + 350
    parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="#ffffff" stroke="{svg.INK}"/>')
    parts.append(svg.text(x + 10, y, "sampled", size=11))
    return "".join(parts)


class ForwardsPicture(ipywidgets.VBox):  # type: ignore[misc]
    """The picture with a slider for the prompt's and one for the output's length."""

    def __init__(self, prompt: int = 8, output: int = 6) -> None:
        self.prompt = ipywidgets.IntSlider(prompt, 1, 24, description="prompt")
        self.output = ipywidgets.IntSlider(output, 1, 16, description="output")
        self._picture = ipywidgets.HTML()
        for slider in (self.prompt, self.output):
            slider.observe(self._draw, "value")
        self._draw()
        super().__init__([ipywidgets.HBox([self.prompt, self.output]), self._picture])

    def _draw(self, _change: Any = None) -> None:
        self._picture.value = self._svg()

    def _svg(self) -> str:
        return forwards_svg(self.prompt.value, self.output.value)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget for a live page, its SVG and words for every other reader."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        return {
            **bundle,
            "image/svg+xml": self._svg(),
            "text/plain": alternative(self.prompt.value, self.output.value),
        }
