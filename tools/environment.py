"""Make a virtual environment if it is not there, install in it with pip, and show how that goes.

    python3 tools/environment.py .venv 'torch>=2.11'
    python3 tools/environment.py .venv --editable '.[test]'

The arguments after the folder are those of ``pip install``. What pip prints goes to ``pip.log`` in the folder. A
terminal shows one line that is rewritten, a pipe a line every 20 seconds. If pip fails, its last lines follow. The file
imports nothing but Python's library, since it runs before anything is installed.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

#: Seconds between two lines in a pipe.
PATIENCE = 20.0
#: Lines of pip's that say why it failed.
LAST_LINES = 25


class Progress:
    """One line on a terminal, now and then a line elsewhere: what is done, for how long, and how much was written."""

    def __init__(self, what: str, out: TextIO) -> None:
        self.what, self.out = what, out
        self.began = self.shown = time.monotonic()
        self.free = shutil.disk_usage(".").free
        self.width = 0
        self._show("")

    def update(self) -> None:
        now = time.monotonic()
        if self.out.isatty() or now - self.shown >= PATIENCE:
            self.shown = now
            # Everything that is written counts, also by other programs: to look through the folder would take longer.
            written = max(0, self.free - shutil.disk_usage(".").free) / 1e6
            self._show(f": {_duration(now - self.began)}, {written:,.0f} MB")

    def end(self, how: str) -> None:
        self._show(f": {how} in {_duration(time.monotonic() - self.began)}")
        if self.out.isatty():
            print(file=self.out, flush=True)

    def _show(self, state: str) -> None:
        columns = shutil.get_terminal_size().columns - 1
        line = f"{self.what}{state}"
        if self.out.isatty():
            line = f"{self.what[: columns - len(state)]}{state}"
            print(f"\r{line.ljust(self.width)}", end="", file=self.out, flush=True)
            self.width = len(line)
        else:
            print(line, file=self.out, flush=True)


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def make(folder: Path, arguments: Sequence[str], out: TextIO = sys.stdout) -> int:
    """Install into the environment, which is made if it is not there. Returns pip's exit status."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    log = folder / "pip.log"
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", *arguments]
    progress = Progress(f"Installing {shlex.join(arguments)} in {folder}", out)
    with log.open("a") as lines:
        before = lines.tell()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT)
        while True:
            try:
                status = process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                progress.update()
            except BaseException:
                process.kill()
                raise
    progress.end("failed" if status else "done")
    if status:
        with log.open() as lines:
            lines.seek(before)
            print(*lines.read().splitlines()[-LAST_LINES:], f"All that pip said is in {log}", sep="\n", file=out)
    return status


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER PIP-ARGUMENTS")
    sys.exit(make(Path(sys.argv[1]), sys.argv[2:]))
