"""Run a command in a terminal and write its real output, with its timing, as an animated SVG.

    python -m tools.record_terminal docs/assets/quickstart.svg --show 'minisandbox quickstart' -- minisandbox quickstart

Pauses longer than ``--pause`` seconds are shortened. The SVG needs no scripts, and follows the reader's light or dark
theme. If the reader prefers reduced motion, it shows only the last screen. The output may contain rewritten lines
(carriage return, erase to the end), bold and green, but no other escape sequences.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

COLUMNS, ROWS = 126, 24
LINE, CHARACTER, MARGIN = 18, 7.8, 14
"""Height of a line, width of a character, and width of the margin, in pixels."""
TAIL = 6.0
"""Seconds for which the last screen is shown."""
STYLE = """
.page { fill: #ffffff; stroke: #d0d7de; }
text { font: 13px ui-monospace, "DejaVu Sans Mono", Consolas, monospace; fill: #1f2328; white-space: pre; }
.b { font-weight: 700; } .g { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #30363d; } text { fill: #e6edf3; } .g { fill: #3fb950; }
}
.s { visibility: hidden; animation: DURATIONs step-end infinite; }
@media (prefers-reduced-motion: reduce) { .s { animation: none !important; } .s:last-of-type { visibility: visible; } }
"""
Event = tuple[float, str]


def main() -> int:
    """Record the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("--show", required=True, help="the command line that the picture shows")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds that a pause takes at most (default: 1)")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    status, events = record(options.command)
    options.out.write_text(picture(options.show, paced(events, options.pause)), encoding="utf-8")
    return status


def record(command: Sequence[str]) -> tuple[int, list[Event]]:
    """Run a command; return its exit status, and its output with the seconds since its start."""
    pid, master = pty.fork()
    if pid == 0:
        os.execvpe(command[0], list(command), {**os.environ, "TERM": "xterm-256color"})
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, events = time.monotonic(), list[Event]()
    while data := _read(master):
        events.append((time.monotonic() - began, data.decode("utf-8", "replace")))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), events


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # EIO: the command has exited
        return b""


def paced(events: Iterable[Event], pause: float) -> list[Event]:
    """Shorten long pauses between events, and merge events less than 0.05 s apart."""
    result, now, last = list[Event](), 0.0, 0.0
    for at, text in events:
        now, last, step = now + min(at - last, pause), at, at - last
        if result and step < 0.05:
            result[-1] = (result[-1][0], result[-1][1] + text)
        else:
            result.append((now, text))
    return result


def screens(events: Iterable[Event]) -> list[tuple[float, list[str]]]:
    """Return the lines on the screen after each event, with their escape sequences for colours."""
    lines, result = [""], list[tuple[float, list[str]]]()
    for at, text in events:
        for part in re.split(r"(\r?\n|\r|\x1b\[K)", text):
            if part in ("\n", "\r\n"):
                lines.append("")
            elif part in ("\r", "\x1b[K"):  # our commands rewrite whole lines
                lines[-1] = ""
            else:
                lines[-1] += part
        result.append((at, lines[-ROWS + 1 :]))
    return result


def picture(command: str, events: list[Event]) -> str:
    """Return the animated SVG of a recording."""
    frames = [(0.0, [f"$ {command}"])]
    frames += [(0.8 + at, [f"$ {command}", *lines][-ROWS:]) for at, lines in screens(events)]
    total = frames[-1][0] + TAIL
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    rules, groups = [], []
    for number, (at, lines) in enumerate(frames):
        until = frames[number + 1][0] if number + 1 < len(frames) else total
        begin, end = 100 * at / total, 100 * until / total
        rules.append(f"@keyframes f{number} {{ {_visible(begin, end)} }} #s{number} {{ animation-name: f{number}; }}")
        rows = "".join(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * (y + 0.75):g}">{_spans(line)}</text>'
            for y, line in enumerate(lines)
        )
        groups.append(f'<g class="s" id="s{number}">{rows}</g>')
    style = STYLE.replace("DURATION", f"{total:.1f}") + "\n".join(rules)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img" aria-label="Recording of '
        f'{html.escape(command)}">\n<style>{style}</style>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )


def _visible(begin: float, end: float) -> str:
    before = "0% { visibility: hidden; } " if begin > 0 else ""
    return f"{before}{begin:.3f}% {{ visibility: visible; }} {end:.3f}% {{ visibility: hidden; }}"


def _spans(line: str) -> str:
    """Convert a line to SVG text, with CSS classes for bold and green."""
    result, kind, room = "", "", COLUMNS
    for part in re.split(r"(\x1b\[[\d;]*m)", line):
        if part.startswith("\x1b["):
            kind = {"1": "b", "32": "g"}.get(part[2:-1], "")
        elif part and room > 0:
            text = html.escape(part[:room])
            room -= len(part)
            result += f'<tspan class="{kind}">{text}</tspan>' if kind else text
    return result


if __name__ == "__main__":
    sys.exit(main())
