"""Display of what a process is doing, so that no wait is silent: one line that is drawn again and again on a terminal,
and a heartbeat line every 10 seconds in a log.

It is started before torch is imported, which takes seconds, so it imports the standard library and rich alone.
"""

import io
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.cells import set_cell_size
from rich.color import ColorSystem
from rich.console import Console as Terminal
from rich.style import Style

from megappo.runtime.durable_files import naming
from megappo.runtime.heartbeat import AFTER, heartbeat

REFRESH_SECONDS = 0.5
HEARTBEAT_SECONDS = 10.0
"""Silence in a log after which a line reports what the process is doing."""
LEAST_SECONDS = 0.05
"""Parts of the start that take less are not listed."""
CLEAR_LINE = "\r\x1b[2K"


class TerminalStream(io.TextIOWrapper):
    """A standard stream on a terminal, of this rank or of another: its text replaces the line that rank 0 draws, which
    is drawn again below."""

    is_at_line_start = True

    def write(self, text: str) -> int:
        """Write a text; a line of it is shown when it is complete."""
        if text:
            super().write(CLEAR_LINE + text if self.is_at_line_start else text)
            self.is_at_line_start = text.endswith("\n")
        return len(text)


def share_terminal() -> bool:
    """Let this process's output and the line that rank 0 draws share the terminal; return whether there is one.

    Without a terminal for both streams nothing is drawn: with `| tee` the line would be drawn among the lines of tee.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or Terminal().is_dumb_terminal:
        return False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, TerminalStream):
            own = TerminalStream(
                stream.buffer,
                stream.encoding,
                errors="backslashreplace",
                line_buffering=True,
            )
            setattr(sys, name, own)
    return True


class Status:
    """Shows this process's heartbeat while it runs. In a run with several ranks, only rank 0 shows it.

    Attributes:
        ends_at: estimated end of the run, by `time.monotonic`; None while it is unknown.
    """

    def __init__(self) -> None:
        self.ends_at: float | None = None
        self._terminal: Terminal | None = None
        self._out: TextIO | None = None
        self._writes_heartbeats = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._last_line = time.monotonic()
        self._times: list[str] = []
        self._started = time.monotonic()

    def start(self, phase: str, *, writes_heartbeats: bool = True) -> None:
        """Show from now on what the process does.

        Args:
            phase: what it does first.
            writes_heartbeats: write a line every `HEARTBEAT_SECONDS` where nothing is drawn.
        """
        heartbeat.enter(phase)
        self._terminal = Terminal() if share_terminal() else None
        self._writes_heartbeats = writes_heartbeats
        self._out = sys.stdout  # what it shows is no part of an output that is redirected meanwhile
        self._last_line = self._started = time.monotonic()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._show_often, name="status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show nothing more, and remove the line that was drawn. A second call does nothing."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        if self._terminal is not None:
            self._draw("")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Show a part of the start while it lasts, and then its time: on a terminal at once, in a log by
        `end_start`."""
        heartbeat.enter(name)
        since = heartbeat.since
        yield
        self.end_step(name, since)

    def end_step(self, name: str, since: float) -> None:
        """Report a part of the start that began at `since`, by `time.monotonic`; does nothing on a rank that shows
        nothing."""
        if self._thread is None:
            return
        seconds = time.monotonic() - since
        if seconds < LEAST_SECONDS:
            return
        if self._terminal is not None:
            self.print(f"  {name:<20} {seconds:6.1f} s")
        else:
            self._times.append(f"{name} {seconds:.1f}")

    def end_start(self) -> None:
        """Print how long the start has taken. A second call does nothing."""
        if self._times:
            seconds = time.monotonic() - self._started
            self.print(f"started in {seconds:.1f} s ({', '.join(self._times)})")
            self._times.clear()

    def print(self, text: str, out: TextIO | None = None) -> None:
        """Print lines; in a log they count as a heartbeat."""
        self._last_line = time.monotonic()
        with naming("the output of the run"):
            print(text, file=out or self._out or sys.stdout, flush=True)

    def styled(self, text: str, style: str) -> str:
        """Return a text in a style of rich, such as "bold red", where the output is a terminal with colours."""
        if self._terminal is None or self._terminal.color_system is None:
            return text
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)

    def _show_often(self) -> None:
        with suppress(OSError, ValueError):  # a terminal or a pipe that is gone; what the run prints reports it
            while not self._stopping.wait(REFRESH_SECONDS):
                self._show()

    def _show(self) -> None:
        if self._terminal is not None:
            if all(getattr(stream, "is_at_line_start", True) for stream in (sys.stdout, sys.stderr)):
                line = set_cell_size(describe_progress(self.ends_at), self._terminal.width - 1)
                self._draw(line.rstrip())
        elif self._writes_heartbeats and time.monotonic() - self._last_line >= HEARTBEAT_SECONDS:
            self.print(f"{time.strftime('%H:%M:%S')}  {describe_progress(self.ends_at)}")

    def _draw(self, line: str) -> None:
        """Replace the line on the terminal, past the stream's notion of lines."""
        self._out.buffer.write((CLEAR_LINE + line).encode(self._out.encoding, "replace"))
        self._out.buffer.flush()


STATUS = Status()
"""The display of this process."""


def describe_progress(ends_at: float | None) -> str:
    """Describe what this process is doing: step, phase, part of the phase, progress and seconds in it.

    Args:
        ends_at: estimated end of the run, by `time.monotonic`.
    """
    now = time.monotonic()
    counted = heartbeat.counted
    seconds = now - heartbeat.since
    name = heartbeat.phase
    phase = f"after {name.removeprefix(AFTER)}" if name.startswith(AFTER) else name
    parts = [phase.replace("_", " ")]
    if heartbeat.part:
        parts.append(heartbeat.part)
    if counted is not None:
        parts.append(f"{counted.done:,} of {counted.total:,} {counted.unit}")
        if counted.tokens:
            parts.append(f"{counted.tokens / max(seconds, 0.1):,.0f} tokens/s")
    parts.append(f"{seconds:.0f} s")
    if ends_at is not None:
        parts.append(f"about {format_seconds(max(ends_at - now, 0.0))} left")
    step = f"{heartbeat.step}: " if heartbeat.step else ""
    return step + ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return seconds as H:MM:SS."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_score(value: float) -> str:
    """Return a score in at most four digits."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"
