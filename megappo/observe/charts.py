"""Small SVG pictures for the report, without a plotting library."""

import html
from collections.abc import Callable, Mapping
from types import MappingProxyType

Points = list[tuple[int, float]]
Place = Callable[[float, float], tuple[float, float]]

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 28
_GRID_LINES = 4
_SHARE_COLOURS = ("#0969da", "#1a7f37", "#bf8700", "#8250df", "#cf222e", "#0e8a86", "#bc4c00", "#6e7781")


def line_chart(points: Points, half_widths: Mapping[int, float] = MappingProxyType({})) -> str:
    """A curve over steps with a labelled grid; a sentence instead when there is nothing to draw.

    Args:
        half_widths: step -> half of the height of the band around the curve there.
    """
    if not points:
        return "<p>Nothing was logged.</p>"
    steps, values = [step for step, _ in points], [value for _, value in points]
    edges = [(step, value + sign * half_widths.get(step, 0.0)) for sign in (1, -1) for step, value in points[::sign]]
    low, high = _bounds(values)
    if half_widths:
        low, high = min(low, *(value for _, value in edges)), max(high, *(value for _, value in edges))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def place(step: float, value: float) -> tuple[float, float]:
        x = _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)
        return x, _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    places = [place(step, value) for step, value in points]
    parts = [_grid_line(low + (high - low) * index / _GRID_LINES, place) for index in range(_GRID_LINES + 1)]
    parts += [_step_label(first, place, "start"), _step_label(last, place, "end")]
    if half_widths:
        parts.append(f'<polygon class="band" points="{_joined([place(*edge) for edge in edges])}"/>')
    parts.append(f'<polyline class="line" points="{_joined(places)}"/>')
    labels = [
        f"{value:.4g}" + (f" +- {half_widths[step]:.2g}" if step in half_widths else "") for step, value in points
    ]
    parts += [
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>step {step}: {text}</title></circle>'
        for (x, y), step, text in zip(places, steps, labels, strict=True)
    ]
    return _svg(_HEIGHT, parts)


def _joined(places: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def share_bar(amounts: dict[str, float]) -> str:
    """One bar cut into the named amounts' shares, largest first, with a legend of percentages below."""
    shown = sorted(((name, amount) for name, amount in amounts.items() if amount > 0), key=lambda item: -item[1])
    total = sum(amount for _, amount in shown)
    if not total:
        return "<p>Nothing was logged.</p>"
    parts, x = [], 0.0
    for index, (name, amount) in enumerate(shown):
        colour = _SHARE_COLOURS[index % len(_SHARE_COLOURS)]
        width = _WIDTH * amount / total
        label = html.escape(f"{name} {100 * amount / total:.1f} %")
        bar = f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" fill="{colour}">'
        parts.append(f"{bar}<title>{label}</title></rect>")
        column, row = index % 4, index // 4
        left, top = column * _WIDTH / 4, 52 + 22 * row
        parts.append(f'<rect x="{left}" y="{top - 10}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="{top}">{label}</text>')
        x += width
    return _svg(60 + 22 * ((len(shown) - 1) // 4), parts)


def _bounds(values: list[float]) -> tuple[float, float]:
    """The value axis: 0 to 1 for fractions, else the values' own range."""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _grid_line(value: float, place: Place) -> str:
    _, y = place(0, value)
    line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'


def _step_label(step: int, place: Place, anchor: str) -> str:
    x, _ = place(step, 0)
    return f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>'


def _svg(height: int, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">' + "".join(parts) + "</svg>"
