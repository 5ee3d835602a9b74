"""What all pictures share: a light card that is readable on any page, and marks that differ
in shape and texture, so that colour is never the only difference."""

from __future__ import annotations

from html import escape

INK = "#1a1a1a"
FAINT = "#8a8a8a"
COMPUTED = "#1f5fa8"

FONT = 'font-family="system-ui, sans-serif"'

# Thin diagonal lines: "kept from before", as opposed to a solid fill, "computed now".
HATCH = (
    '<pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="4" height="4" fill="#ffffff"/>'
    f'<line x1="0" y1="0" x2="0" y2="4" stroke="{INK}" stroke-width="1"/></pattern>'
)


def text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start") -> str:
    """One line of text at a baseline position, in pixels."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}" '
        f"{FONT}>{escape(content)}</text>"
    )


def card(width: float, height: float, body: str, alternative: str) -> str:
    """A whole picture: `body` on a light card, with its text alternative."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(alternative)}" '
        'style="max-width: 100%; height: auto">'
        f"<title>{escape(alternative)}</title><defs>{HATCH}</defs>"
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff" stroke="{FAINT}"/>'
        f"{body}</svg>"
    )
