"""From the log files of the ranks to one console: whole lines with the rank in front, one line drawn in place."""

from __future__ import annotations

import codecs
import os
import shutil
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

LAUNCHER_LOG = "launcher.log"
"""What accelerate and torchrun say, and a single rank before it has its own log."""

_LONGEST_LINE = 64 * 1024
_CLEAR_LINE = "\r\x1b[K"


class LineSplitter:
    """Bytes in, whole lines out.

    A carriage return starts the line anew, as on a terminal, so of a progress bar only its last state is a line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = ""

    @property
    def live(self) -> str:
        """The unfinished line, as a terminal would show it."""
        return _visible(self._pending)

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes and return the lines that they finish, in characters, without line ends."""
        *finished, rest = (self._pending + self._decoder.decode(data)).split("\n")
        lines = [_visible(line) for line in finished]
        before, returned, after = rest.rpartition("\r")
        self._pending = rest if not returned else (after or _visible(before) + "\r")
        if len(self._pending) > _LONGEST_LINE:
            lines.append(_visible(self._pending))
            self._pending = ""
        return lines

    def finish(self) -> list[str]:
        """The last line, if it has no line end."""
        rest = _visible(self._pending + self._decoder.decode(b"", final=True))
        self._pending = ""
        return [rest] if rest else []


def _visible(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")


class Console:
    """Where a launch speaks to a person. Lines go out whole; on a terminal one live line stays below them.

    A console that goes away (a closed terminal, `| head`) ends the speaking, not the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = ""
        self._gone = False
        self.is_terminal = stream.isatty()
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")

    def line(self, text: str) -> None:
        """Print one line above the live line."""
        if self._live:
            self._write(f"{_CLEAR_LINE}{text}\n{self._fitted(self._live)}")
        else:
            self._write(f"{text}\n")

    def alert(self, text: str) -> None:
        """Print one line that a person who waits wants to see even where lines go into a file."""
        self.line(text)

    def live(self, text: str) -> None:
        """Draw the live line anew; an empty text removes it. Nothing happens where there is no terminal."""
        if self.is_terminal and text != self._live:
            self._live = text
            self._write(f"{_CLEAR_LINE}{self._fitted(text)}")

    def _fitted(self, text: str) -> str:
        # A live line that wraps can't be taken back with one carriage return.
        return text[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._gone = True
            # The interpreter flushes once more when it leaves, and would fail there.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class RankLogs:
    """Follows the log files of all ranks of one launch; a file may appear at any time."""

    def __init__(self, log_dir: Path, world_size: int, console: Console) -> None:
        self._log_dir = log_dir
        self._console = console
        self._digits = len(str(world_size - 1))
        self._offsets: dict[int, int] = {}
        self._splitters: dict[int, LineSplitter] = {}

    def pump(self) -> None:
        """Print what the ranks wrote since the last call."""
        for rank, path in rank_logs(self._log_dir).items():
            splitter = self._splitters.setdefault(rank, LineSplitter())
            try:
                with path.open("rb") as file:
                    file.seek(self._offsets.get(rank, 0))
                    data = file.read()
            except OSError:  # a shared file system that hiccups must not end a run; the next call reads on
                continue
            self._offsets[rank] = self._offsets.get(rank, 0) + len(data)
            lines = splitter.feed(data)
            if rank == 0 and lines:
                self._console.live("")  # these lines came after it, and may have taken its place
            self._print(rank, lines)
            if rank == 0 and splitter.live:
                self._console.live(self._prefixed(rank, splitter.live))

    def finish(self) -> None:
        """Print the rest, line end or not; nothing is lost at the end."""
        self.pump()
        self._console.live("")
        for rank, splitter in self._splitters.items():
            self._print(rank, splitter.finish())

    def _print(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._console.line(self._prefixed(rank, line))

    def _prefixed(self, rank: int, line: str) -> str:
        return f"[rank {rank:{self._digits}}] {line}"


def rank_logs(log_dir: Path) -> dict[int, Path]:
    """The log files that the ranks of one launch have by now, by rank."""
    found = {path.stem.removeprefix("rank"): path for path in log_dir.glob("rank*.log")}
    return {int(rank): found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)}


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` non-empty lines of a log, as a terminal would show them; none where there is no log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - count * 4096))
        data = file.read()
    splitter = LineSplitter()
    lines = [*splitter.feed(data), *splitter.finish()]
    return [line for line in lines if line.strip()][-count:]
