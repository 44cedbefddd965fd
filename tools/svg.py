"""Parts of the figures that tools draw, as text of an SVG."""

from collections.abc import Iterable, Sequence

WIDTH, HEIGHT, MARGIN = 560, 320, 48
COLOURS = ("#4269d0", "#ef8e3b", "#3ca951", "#a463f2", "#9c6b4e", "#ff725c")
STYLE = """<style>
  .ground { fill: #f6f8fa } text:not([fill]) { fill: #1f2328 }
  @media (prefers-color-scheme: dark) { .ground { fill: #161b22 } text:not([fill]) { fill: #e6edf3 } }
</style>"""
Point = tuple[float, float]
"""Place in a figure, from its upper left corner."""


def figure(x_label: str, parts: Iterable[str]) -> str:
    """Return a figure with a label below its x axis, readable on light and dark pages."""
    size = f"{WIDTH} {HEIGHT}"
    frame = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">',
        STYLE,
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_label}</text>',
    ]
    return "\n".join([*frame, *parts, "</svg>"]) + "\n"


def place(x_part: float, y_part: float) -> Point:
    """Return a place within the margins, given as parts of the width from the left and of the height from below."""
    return round(MARGIN + (WIDTH - 2 * MARGIN) * x_part, 1), round(HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y_part, 1)


def line(places: Sequence[Point], colour: str) -> str:
    """Return a line through some places."""
    joined = " ".join(f"{x},{y}" for x, y in places)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
