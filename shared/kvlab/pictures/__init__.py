"""Pictures of mechanisms: pure functions from state to SVG, and widgets on top.

A function returns the SVG as text, with a text alternative that says what the
picture says. A widget adds sliders that work by keyboard; without a kernel a
page shows its SVG.
"""

from kvlab.pictures.forwards import ForwardsPicture, forwards_svg
from kvlab.pictures.path import PathPicture, path_svg
from kvlab.pictures.timeline import Timeline, timeline_svg

__all__ = ["ForwardsPicture", "PathPicture", "Timeline", "forwards_svg", "path_svg", "timeline_svg"]
