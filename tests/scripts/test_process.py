"""Locks, workspaces and commands of a build: nothing outlives it, however it ends."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from imagebuild import process
from imagebuild.process import BuildError, Workspace, error_lines, hold_lock, run_logged

PREFIX = f"pytorch-dl-hpc-{os.geteuid()}-"


def gone(pid):
    """Whether a process is over (a zombie is) or will be before long."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def script(code, tmp_path, **options):
    """A Python process of its own that has the module's names; `tmp` is tmp_path."""
    start = f"""
import sys, os, time, signal
from pathlib import Path
sys.path.insert(0, {str(Path(process.__file__).parents[1])!r})
from imagebuild.process import *
tmp = Path({str(tmp_path)!r})
"""
    return subprocess.Popen(
        [sys.executable, "-c", start + code], stdout=subprocess.PIPE, text=True, **options
    )


# ---- locks ---------------------------------------------------------------------------------


def test_the_second_holder_is_told_who_the_first_is(tmp_path):
    lock = tmp_path / "lock"
    holder = f"process {os.getpid()} on {os.uname().nodename}"
    with hold_lock(lock, "a build"), pytest.raises(BuildError) as caught, hold_lock(
        lock, "a build"
    ):
        pass
    assert str(caught.value) == (
        f"a build is running ({holder}): wait for it, or `kill {os.getpid()}`"
    )
    with hold_lock(lock, "a build"):
        pass  # it is free again, and so is a lock whose holder failed:
    with pytest.raises(KeyError), hold_lock(lock, "a build"):
        raise KeyError
    with hold_lock(lock, "a build"):
        pass


def test_a_lock_that_was_just_taken_has_no_name_yet(tmp_path):
    expected = pytest.raises(BuildError, match=r"is running \(process unknown\): wait for it$")
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with expected, hold_lock(tmp_path / "lock", "a build"):
            pass


def test_a_killed_holder_frees_the_lock(tmp_path):
    """The kernel drops it; the name of the dead one does no harm."""
    child = script(
        "with hold_lock(tmp / 'lock', 'x'): print('held', flush=True); time.sleep(99)", tmp_path
    )
    assert child.stdout.readline() == "held\n"
    with pytest.raises(BuildError, match=f"process {child.pid} on"), hold_lock(
        tmp_path / "lock", "x"
    ):
        pass
    child.kill()
    child.communicate()
    assert str(child.pid) in (tmp_path / "lock").read_text()
    with hold_lock(tmp_path / "lock", "x"):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_patient_second_holder_waits(tmp_path):
    """And says for whom."""
    code = "with hold_lock(tmp / 'lock', 'the other', wait=True): print((tmp / 'done').exists())"
    with hold_lock(tmp_path / "lock", "x"):
        child = script(code, tmp_path)
        line = child.stdout.readline()
        (tmp_path / "done").touch()
    assert line.startswith(f"waiting for the other (process {os.getpid()} on")
    assert child.communicate(timeout=60)[0] == "True\n"


# ---- workspaces ----------------------------------------------------------------------------


def test_a_workspace_is_private_and_goes_away(tmp_path):
    """Also where its block fails; the directory that holds it is made, and stays."""
    with pytest.raises(KeyError), Workspace(tmp_path / "new/tmp") as work:
        assert work.path.parent == tmp_path / "new/tmp"
        assert work.path.name.startswith(PREFIX)
        assert work.path.stat().st_mode & 0o777 == 0o700
        (work.path / "closed").mkdir(mode=0o500)
        raise KeyError
    assert list((tmp_path / "new/tmp").iterdir()) == []


def test_the_workspace_of_a_dead_process_is_cleared_away(tmp_path, capsys):
    """That of a live one, of another user, links and other files stay."""
    child = script("with Workspace(tmp) as w: print(w.path, flush=True); time.sleep(99)", tmp_path)
    dead = Path(child.stdout.readline().strip())
    child.kill()
    child.communicate()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / "pytorch-dl-hpc-99999-other").mkdir()
    with Workspace(tmp_path) as live, Workspace(tmp_path) as second:
        assert not dead.exists()
        assert live.path.is_dir()
        assert live.path != second.path
    assert capsys.readouterr().out == f"removing {dead}, left by a process that was killed\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere", f"{PREFIX}link", "pytorch-dl-hpc-99999-other",
    ]  # fmt: skip


def test_a_workspace_that_vanishes_while_it_is_looked_at(tmp_path, monkeypatch):
    """Another process ends at this very moment: no error."""
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, _: [*glob(self, "*"), tmp_path / f"{PREFIX}gone"]
    )
    with Workspace(tmp_path) as work:
        assert work.path.is_dir()


def test_a_workspace_is_locked_before_others_can_find_it(tmp_path, monkeypatch):
    """Else another build could take it for a dead one's in the moment before the lock."""
    rename = Path.rename

    def check(self, target):
        assert not self.name.startswith(PREFIX)
        with (self / ".lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", check)
    with Workspace(tmp_path) as work:
        assert work.path.name.startswith(PREFIX)


# ---- commands ------------------------------------------------------------------------------


def run(tmp_path, code, **env):
    run_logged(["sh", "-c", code], log=tmp_path / "log", env={**os.environ, **env}, cwd=tmp_path)


def test_the_log_has_all_and_the_terminal_the_milestones(tmp_path, capsys):
    run(
        tmp_path, "pwd; echo '==> step one'; echo INFO:    Creating SIF file... >&2; echo $X", X="y"
    )
    run(tmp_path, "echo more")
    out = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\[ *\d+ s\] ", "", line) for line in out] == [
        "step one",
        "Creating SIF file...",
    ]
    log = (tmp_path / "log").read_text()
    assert (
        f"\n{tmp_path}\n==> step one\nINFO: Creating SIF file...\ny\n$ sh -c echo more\nmore\n"
        in log
    )


def test_v_shows_everything_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("V", "1")
    with pytest.raises(BuildError):
        run(tmp_path, "echo hello; echo 'error: bad'; exit 3")
    assert capsys.readouterr() == ("hello\nerror: bad\n", "")


def test_a_failure_is_one_line_after_the_end_of_the_log(tmp_path, capsys):
    """Of this command's part of the log, with the cause and the log's name."""
    run(tmp_path, "echo 'E: an old story'")
    with pytest.raises(BuildError) as caught:
        run(tmp_path, "seq 100; echo 'E: a new one'; exit 3")
    assert str(caught.value) == f"sh failed: E: a new one; log: {tmp_path / 'log'}"
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"  {number}" for number in range(87, 101)] + ["  E: a new one"]
    with pytest.raises(BuildError, match="^sh failed: last words; log"):
        run(tmp_path, "echo last words; exit 3")
    assert capsys.readouterr().err == "  last words\n"


def test_a_command_that_is_missing_names_itself(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run_logged(["no-such-program"], log=tmp_path / "log", env={}, cwd=tmp_path)


def test_passwords_do_not_reach_log_and_terminal(tmp_path, capsys, monkeypatch):
    with pytest.raises(BuildError) as caught:
        run(tmp_path, "echo '==> get http://u:secret@h/x'; echo error: http://u:secret@h; exit 1")
    seen = [*capsys.readouterr(), str(caught.value), (tmp_path / "log").read_text()]
    assert all("***@h" in text and "secret" not in text for text in seen)


FAMILY = (
    'echo "==> $$"; sleep 1000 & echo "==> $!"; (trap "" TERM; echo "==> $BASHPID"; sleep 1000)'
)


def start_family(tmp_path, prepare="pass"):
    """A build process with a command that has children, one of them deaf to TERM; their pids."""
    code = f"""
{prepare}
catch_signals()
try:
    with Workspace(tmp / 'tmp') as work:
        run_logged(['bash', '-c', {FAMILY!r}], log=tmp / 'log', env=dict(os.environ), cwd=work.path)
except KeyboardInterrupt as signal:
    print(signal)
    sys.exit(130)
"""
    parent = script(code, tmp_path)
    pids = [int(parent.stdout.readline().split()[-1]) for _ in range(3)]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    return parent, pids


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_command_and_its_children(tmp_path, number):
    parent, pids = start_family(tmp_path)
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (130, f"{number.name}\n")
    assert all(gone(pid) for pid in pids)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_second_signal_does_not_disturb_the_cleaning(tmp_path):
    """An impatient Ctrl-C, Ctrl-C."""
    slowly = "print('cleaning', flush=True), time.sleep(0.3), remove(directory)"
    prepare = f"""
from imagebuild import process
remove = process.remove_tree
process.remove_tree = lambda directory: ({slowly})
"""
    parent, pids = start_family(tmp_path, prepare)
    parent.send_signal(signal.SIGINT)
    assert parent.stdout.readline() == "cleaning\n"
    parent.send_signal(signal.SIGINT)
    parent.send_signal(signal.SIGTERM)
    out, _ = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (130, "SIGINT\n")
    assert all(gone(pid) for pid in pids)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nohup_is_respected(tmp_path):
    """A signal that was ignored when the process began stays ignored."""
    child = script(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); catch_signals()\n"
        "os.kill(os.getpid(), signal.SIGHUP); print('alive')",
        tmp_path,
    )
    assert child.communicate(timeout=60)[0] == "alive\n"


def test_kill_9_of_the_parent_ends_the_command_and_its_children(tmp_path):
    """Nothing in the parent can run then: the guard beside it does."""
    parent, pids = start_family(tmp_path)
    parent.kill()
    parent.communicate(timeout=60)
    assert all(gone(pid) for pid in pids)


def test_a_command_that_ends_leaves_no_guard(tmp_path, capsys):
    """And the guard does not hit whatever has that process group later."""
    run(tmp_path, 'sleep 1000 > /dev/null 2>&1 & echo "==> $!"')
    daemon = int(capsys.readouterr().out.split()[-1])
    assert "sleep" in Path(f"/proc/{daemon}/cmdline").read_text()
    os.kill(daemon, signal.SIGKILL)
    children = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    assert "kill -s TERM" not in children


# ---- words for errors ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (BuildError("one", "two"), ["one", "two"]),
        (OSError(13, "Permission denied", "/a"), ["/a: Permission denied"]),
        (OSError(13, "Permission denied"), ["Permission denied"]),
        (OSError(13, "Permission denied", "/a", None, "/b"), ["/b: Permission denied"]),
        (OSError("odd"), ["odd"]),
    ],
)
def test_errors_in_words(error, lines):
    assert error_lines(error) == lines


def test_a_full_disk_in_words():
    """Whichever file it was: Python often does not say."""
    (line,) = error_lines(OSError(28, "No space left on device", "/a"))
    assert line.startswith("the disk is full (No space left on device): free some space, or choose")


def test_the_temporary_directory(monkeypatch):
    for name in ("TMPDIR", "APPTAINER_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert process.temporary_directory() == Path("/tmp")
    monkeypatch.setenv("TMPDIR", "/t")
    assert process.temporary_directory() == Path("/t")
    monkeypatch.setenv("APPTAINER_TMPDIR", "relative")
    assert process.temporary_directory() == Path.cwd() / "relative"
