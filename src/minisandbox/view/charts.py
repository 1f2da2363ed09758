"""Draw charts as SVG on the server. They need no script, take their colours from the style sheet, and print well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 320, 120


def stacked_bar(parts: Mapping[str, float], width: int = 600, height: int = 14) -> Markup:
    """Draw the shares of parts as one bar.

    Args:
        parts: the size of each part; its name is also the class that selects its colour.
        width: units of the drawing, which is as wide as its place.
        height: its height in pixels.
    """
    total, x, rects = sum(parts.values()), 0.0, Markup()
    for name, size in parts.items():
        if total and size > 0:
            share = width * size / total
            title = Markup("<title>{}: {:.0%}</title>").format(name, size / total)
            rects += Markup('<rect class="stage-{}" x="{:.2f}" width="{:.2f}" height="{}">{}</rect>').format(
                name, x, share, height, title
            )
            x += share
    return Markup('<svg class="bar" viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>').format(
        width, height, rects
    )


def interval(mean: float, bounds: tuple[float, float] | None) -> Markup:
    """Draw a proportion from 0 to 1 as a bar, with its interval as a line."""
    drawing = Markup('<rect class="rate-track" width="100" height="10" rx="2"/>')
    drawing += Markup('<rect class="rate" width="{:.1f}" height="10" rx="2"/>').format(100 * mean)
    if bounds:
        first, last = (100 * bound for bound in bounds)
        drawing += Markup('<path class="rate-interval" d="M{:.1f} 5H{:.1f}M{:.1f} 2V8M{:.1f} 2V8"/>').format(
            first, last, first, last
        )
    frame = Markup(
        '<svg class="proportion" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    )
    return frame.format(drawing)


def curve(points: Sequence[tuple[float, float, str]], label: str) -> Markup:
    """Draw a curve whose points are links.

    Args:
        points: x, y, and the link of each point, or "".
        label: the name of the curve.
    """
    finite = [point for point in points if all(map(math.isfinite, point[:2]))]
    if not finite:
        return Markup()
    first, last = min(x for x, *_ in finite), max(x for x, *_ in finite)
    low, high = min(y for _, y, _ in finite), max(y for _, y, _ in finite)

    def position(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / (last - first) if last > first else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return 60 + across * (_WIDTH - 70), 10 + (1 - up) * (_HEIGHT - 32)

    positions = [position(x, y) for x, y, _ in finite]
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in positions)
    dots = Markup()
    for (x, y), (step, value, link) in zip(positions, finite, strict=True):
        dot = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"><title>{:g}: {:.5g}</title></circle>').format(
            x, y, 3 if link else 2, step, value
        )
        dots += Markup('<a href="{}">{}</a>').format(link, dot) if link else dot
    axes = [(54, 14, f"{high:.4g}"), (54, _HEIGHT - 20, f"{low:.4g}")] if high > low else [(54, 58, f"{high:.4g}")]
    labels = Markup().join(Markup('<text class="y" x="{}" y="{}">{}</text>').format(*axis) for axis in axes)
    labels += Markup('<text x="60" y="{}">{:g}</text><text class="y" x="{}" y="{}">{:g}</text>').format(
        _HEIGHT - 4, first, _WIDTH - 10, _HEIGHT - 4, last
    )
    return Markup(
        '<svg class="curve" viewBox="0 0 {} {}" role="group" aria-label="{}"><path d="{}"/>{}{}</svg>'
    ).format(_WIDTH, _HEIGHT, escape(label), line, dots, labels)


def stacked_columns(
    columns: Sequence[tuple[int, str, Sequence[tuple[str, float]]]], line: Mapping[int, float], label: str
) -> Markup:
    """Draw columns of shares from 0 to 1, and a line over them.

    Args:
        columns: the number of each column, its link, and its parts from below: the class of the colour, and the share.
        line: values from 0 to 1 by the columns' numbers.
        label: the name of the chart.
    """
    width, height, margin = 640, 220, 34
    step = (width - margin) / max(1, len(columns))
    bars, points = Markup(), []
    for index, (number, link, parts) in enumerate(columns):
        x, top, rects, names = margin + index * step, height - 20.0, Markup(), []
        for name, share in parts:
            size = share * (height - 30)
            top -= size
            names.append(f"{name} {share:.0%}")
            rects += Markup('<rect class="part-{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/>').format(
                name, x + step * 0.1, top, step * 0.8, size
            )
        title = f"step {number}: {', '.join(names)}"
        if number in line and math.isfinite(line[number]):
            points.append(f"{x + step / 2:.2f} {height - 20 - line[number] * (height - 30):.2f}")
            title += f"; mean reward {line[number]:.2f}"
        bars += Markup('<a href="{}" aria-label="{}"><title>{}</title>').format(link, title, title)
        bars += Markup('<rect class="hit" x="{:.2f}" y="0" width="{:.2f}" height="{}"/>').format(x, step, height - 20)
        bars += rects + Markup("</a>")
        if index % max(1, len(columns) // 8) == 0:
            bars += Markup('<text x="{:.2f}" y="{}">{}</text>').format(x, height - 4, number)
    axis = Markup().join(
        Markup('<text class="y" x="{}" y="{:.0f}">{} %</text>').format(
            margin - 4, height - 16 - value * (height - 30), text
        )
        for value, text in ((0, 0), (0.5, 50), (1, 100))
    )
    path = Markup('<path class="over" d="M{}"/>').format("L".join(points)) if len(points) > 1 else Markup()
    frame = Markup('<svg class="columns-chart" viewBox="0 0 {} {}" role="group" aria-label="{}">{}{}{}</svg>')
    return frame.format(width, height, label, axis, bars, path)
