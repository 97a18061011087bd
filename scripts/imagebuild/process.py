"""Locks, throw-away work directories and logged commands: what keeps a build's mess contained."""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Iterator, List, Optional, TextIO, Type


class BuildError(Exception):
    """A build cannot go on; the text says what was seen, what was wanted and the remedy."""


@contextlib.contextmanager
def hold_lock(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Hold an advisory lock; the kernel drops it when the process dies, however it dies.

    Raises BuildError with the other holder's pid where the lock is taken and `wait` is false.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            if not wait:
                raise BuildError(
                    f"{what} is running (process {holder}): wait for it, or stop it with"
                    f" `kill {holder.split()[0]}`"
                ) from None
            print(f"waiting for {what} (process {holder})", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


class Workspace:
    """A private directory under the temporary one, removed at the end, also of a killed build.

    Every workspace holds a lock on itself. One whose lock is free belongs to a build that was
    killed, and the next build clears it away.
    """

    def __init__(self, temporary: Path, log: Path) -> None:
        self.log = log
        self._prefix = f"pytorch-dl-hpc-{os.geteuid()}-"
        self._temporary = temporary
        self.path = Path()

    def __enter__(self) -> "Workspace":
        for stale in self._temporary.glob(self._prefix + "*"):
            remove_if_abandoned(stale)
        self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._temporary))
        self.log.write_text("")
        self._lock = (self.path / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        remove_tree(self.path)
        self._lock.close()


def remove_if_abandoned(directory: Path) -> None:
    """Remove the workspace of a dead build; leave the one of a live build alone."""
    lock = directory / ".lock"
    if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
        return
    with contextlib.suppress(BlockingIOError), lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(f"removing {directory}, left by a build that was killed", flush=True)
        remove_tree(directory)


def remove_tree(directory: Path) -> None:
    """Remove a tree that may hold files of subordinate user ids, which --fakeroot makes."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists() and os.geteuid() != 0:
        # Only inside a user namespace that maps those ids may an ordinary user remove the files.
        subprocess.run(
            ["unshare", "--user", "--map-root-user", "--map-auto", "rm", "-rf", str(directory)],
            stderr=subprocess.DEVNULL,
            check=False,
        )
    if directory.exists():
        print(f"warning: {directory} could not be removed", file=sys.stderr)


def catch_signals() -> None:
    """Make TERM and HUP unwind like Ctrl-C does, so that `with` blocks clean up."""

    def stop(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)


def run_logged(command: List[str], *, log: Path, env: dict, cwd: Path) -> None:
    """Run a command; its output goes to the log, its milestones ("==> …") to the terminal.

    V=1 in the environment shows everything. Raises BuildError with the log's end on failure.
    """
    started = time.monotonic()
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            _relay(child.stdout, file, started)
            code = child.wait()
        except BaseException:
            stop_group(child)
            raise
    if code != 0:
        tail = "\n".join(f"  {line}" for line in log.read_text().splitlines()[-25:])
        raise BuildError(f"`{' '.join(command[:2])}` failed with exit code {code}:\n{tail}\nlog: {log}")


def _relay(lines: Optional[TextIO], file: TextIO, started: float) -> None:
    show_all = os.environ.get("V") == "1"
    for line in lines or ():
        file.write(line)
        file.flush()
        milestone = re.match(r"==> (.*)|INFO:\s+(Creating SIF file.*|Running testscript)", line)
        if show_all:
            sys.stdout.write(line)
        elif milestone:
            text = milestone.group(1) or milestone.group(2)
            print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)


def stop_group(child: "subprocess.Popen[str]") -> None:
    """End a command and all that it started: TERM, five seconds, KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue


def _die_with_parent() -> None:
    """prctl(2) PR_SET_PDEATHSIG: a killed `make image` must not leave Apptainer building on."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
