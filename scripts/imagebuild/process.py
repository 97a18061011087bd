"""Locks, throw-away work directories and logged commands: what keeps a build's mess contained."""

import contextlib
import errno
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
from typing import Iterable, Iterator, List, Mapping, Optional, TextIO, Type

from .diagnosis import explain, without_passwords

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Waits for the end of its input, which comes when the process at the other end is gone, then ends
# the process group $0. PR_SET_PDEATHSIG (prctl(2)) would be lost where Apptainer changes its ids.
GUARD = 'read -r _; kill -s TERM -- "-$0"; sleep 1; kill -s KILL -- "-$0"'
SHOWN_LINES = 15  # of the log, when a command fails


class BuildError(Exception):
    """A build cannot go on. Each argument is one line: what was seen, was wanted, the remedy."""


def error_lines(error: Exception) -> List[str]:
    """What to tell the user about an error, line by line."""
    if isinstance(error, BuildError):
        return [str(line) for line in error.args]
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return [explain([str(error.strerror)])]
    if isinstance(error, OSError) and error.strerror:
        name = error.filename2 or error.filename
        return [f"{name}: {error.strerror}" if name else error.strerror]
    return [str(error)]


def temporary_directory() -> Path:
    """Where images are unpacked and downloaded: Apptainer's own variable, then TMPDIR."""
    return Path(os.environ.get("APPTAINER_TMPDIR") or os.environ.get("TMPDIR") or "/tmp").absolute()


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
                remedy = f", or `kill {holder.split()[0]}`" if holder[0].isdigit() else ""
                raise BuildError(
                    f"{what} is running (process {holder}): wait for it{remedy}"
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
    """A private directory under the temporary one, removed at the end, also of a killed process.

    Every workspace holds a lock on itself. One whose lock is free belongs to a process that was
    killed, and the next one clears it away.
    """

    def __init__(self, temporary: Path, log: Optional[Path] = None) -> None:
        self.log = log or Path(os.devnull)
        self._prefix = f"pytorch-dl-hpc-{os.geteuid()}-"
        self._temporary = temporary
        self.path = Path()

    def __enter__(self) -> "Workspace":
        self._temporary.mkdir(parents=True, exist_ok=True)
        for stale in self._temporary.glob(self._prefix + "*"):
            remove_if_abandoned(stale)
        # Locked before it has the name that others look for.
        fresh = Path(tempfile.mkdtemp(prefix=f".new-{self._prefix}", dir=str(self._temporary)))
        self._lock = (fresh / ".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = fresh.with_name(fresh.name[len(".new-") :])
        fresh.rename(self.path)
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
    """Remove the workspace of a dead process; leave the one of a live process alone."""
    # It may vanish at any moment: its process ends, or another one clears it away.
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
            return
        with (directory / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(f"removing {directory}, left by a process that was killed", flush=True)
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
    """Make TERM and HUP unwind like Ctrl-C does, so that `with` blocks clean up, undisturbed."""

    def stop(number: int, _frame: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup(1) leaves it
            signal.signal(number, stop)


def run_logged(command: List[str], *, log: Path, env: Mapping[str, str], cwd: Path) -> None:
    """Run a command; its output goes to the log, its milestones ("==> …") to the terminal.

    V=1 in the environment shows everything. Raises BuildError with the cause where it fails.
    """
    show_all = os.environ.get("V") == "1"
    with log.open("a") as file:
        begin = file.tell()
        file.write(without_passwords(f"$ {' '.join(command)}\n"))
        file.flush()
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with supervised(command, env=env, cwd=cwd, **output) as child:
            _relay(child.stdout or (), file, show_all)
            code = child.wait()
    if code != 0:
        with log.open() as file:
            file.seek(begin)
            lines = file.read().splitlines()[1:]
        if not show_all:
            print("".join(f"  {line}\n" for line in lines[-SHOWN_LINES:]), end="", file=sys.stderr)
        cause = explain(lines[-3 * SHOWN_LINES :])
        raise BuildError(f"{Path(command[0]).name} failed: {cause}; log: {log}")


def _relay(lines: Iterable[str], file: TextIO, show_all: bool) -> None:
    started = time.monotonic()
    for line in map(without_passwords, lines):
        file.write(line)
        file.flush()
        milestone = re.match(r"==> (.*)|INFO:\s+(Creating SIF file.*|Running testscript)", line)
        if show_all:
            sys.stdout.write(line)
        elif milestone:
            text = milestone.group(1) or milestone.group(2)
            print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)


@contextlib.contextmanager
def supervised(command: List[str], **options: object) -> "Iterator[subprocess.Popen[str]]":
    """Start a command that ends, with all that it started, when this process or the block is cut.

    A killed `make image` must not leave Apptainer building on.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        **options,
    )
    guard = None
    try:
        guard = subprocess.Popen(
            ["sh", "-c", GUARD, str(child.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        yield child
    except BaseException:
        stop_group(child)
        raise
    finally:
        if guard is not None:
            guard.kill()
            guard.communicate()


def stop_group(child: "subprocess.Popen[str]") -> None:
    """End a command and all that it started: TERM, five seconds, KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
