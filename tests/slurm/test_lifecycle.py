"""Starting and stopping the cluster: side by side, after a crash, and where it cannot work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import client
import cluster
import pytest
from cluster import wait_until

pytestmark = pytest.mark.slurm

Start = Callable[[str], cluster.Cluster]


def list_cgroups() -> set[str]:
    """Return the names of the cgroups at the top of the hierarchy that Slurm uses."""
    look = "mount -t cgroup -o freezer none /sys/fs/cgroup; ls /sys/fs/cgroup"
    command = ["unshare", "--mount", "sh", "-euc", look]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def traces(name: str) -> list[str]:
    """Return what the kernel still has of a cluster: links and cgroups."""
    links = [link.name for link in Path("/sys/class/net").iterdir() if link.name.startswith(name)]
    return links + [group for group in list_cgroups() if group == name]


def test_stop_leaves_no_trace(start_cluster: Start) -> None:
    """Not even of a task that froze itself, which no signal reaches."""
    others = list_cgroups()
    running = start_cluster("one")
    slurm = client.Slurm(running, running.directory)
    group = "/sys/fs/cgroup/freezer$(grep :freezer: /proc/self/cgroup | cut -d: -f3)"
    freeze = ["bash", "-c", f"echo FROZEN >{group}/freezer.state"]
    job = slurm.submit(["srun", "-N2", "-n2", *freeze], "-N2")

    def frozen() -> list[int]:
        stats = {pid: Path(f"/proc/{pid}/stat").read_text() for pid in slurm.processes(job.id)}
        return [pid for pid, stat in stats.items() if stat.rpartition(")")[2].split()[0] == "D"]

    job.wait_until(lambda: len(frozen()) == 2, "two frozen tasks", 20)
    assert traces(running.name)
    cluster.stop(running.directory)
    assert traces(running.name) == []
    assert not any(group.startswith("slurm_n") for group in list_cgroups() - others)
    assert slurm.processes(job.id) == {}
    assert cluster.find_daemons(running.directory) == {}
    assert cluster.find(running.directory) is None


def test_start_returns_the_cluster_that_runs(start_cluster: Start) -> None:
    first = start_cluster("one")
    daemons = cluster.find_daemons(first.directory)
    assert start_cluster("one") == first
    assert cluster.find_daemons(first.directory) == daemons


@pytest.mark.parametrize("daemon", ["munged --", "slurmctld -D", "slurmd -D -N n2"])
def test_start_replaces_a_cluster_that_lost_a_daemon(start_cluster: Start, daemon: str) -> None:
    directory = start_cluster("one").directory
    daemons = cluster.find_daemons(directory)
    (lost,) = [pid for pid, command in daemons.items() if command.startswith(daemon)]
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: lost not in cluster.find_daemons(directory), "its end", 5)
    running = start_cluster("one")
    assert running.idle_nodes() == {"n1", "n2"}
    assert daemons.keys().isdisjoint(cluster.find_daemons(directory))


def sleeps(job: client.Job) -> bool:
    """Say whether the job's task runs."""
    return any(
        command.endswith("bin/sleep 100") for command in job.slurm.processes(job.id).values()
    )


def test_two_clusters_run_side_by_side(start_cluster: Start) -> None:
    """Jobs of the same number stay apart: cancelling one leaves the other alone."""
    clusters = [start_cluster(name) for name in ("one", "two")]
    jobs = [
        client.Slurm(running, running.directory).submit(["srun", "sleep", "100"])
        for running in clusters
    ]
    assert jobs[0].id == jobs[1].id
    for job in jobs:
        job.wait_until(lambda job=job: sleeps(job), "sleep")
    jobs[0].cancel()
    assert jobs[0].wait().state == "CANCELLED"
    assert jobs[1].state() == "RUNNING"
    assert sleeps(jobs[1])


def test_starts_take_turns(start_cluster: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster.one_at_a_time(), monkeypatch.context() as patch:
        patch.setattr(cluster, "DEADLINE", 0.1)
        with pytest.raises(cluster.ClusterError, match="another start"):
            start_cluster("one")


def test_what_a_killed_run_leaves_is_swept_by_the_next(
    start_cluster: Start, tmp_path: Path
) -> None:
    code = (
        "import cluster, os, pathlib, sys\n"
        "print(cluster.start(pathlib.Path(sys.argv[1]), die_with_caller=True).name, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "killed")]
    done = subprocess.run(command, cwd=cluster.HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not cluster.find_daemons(tmp_path / "killed"), "the daemons' death", 10)
    assert traces(done.stdout.strip())
    start_cluster("one")
    assert cluster.find(tmp_path / "killed") is None
    cluster.stop(tmp_path / "one")
    assert traces(done.stdout.strip()) == []


def test_a_failed_start_shows_the_logs_and_leaves_no_trace(
    start_cluster: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "node.sh"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = run ]; then echo "the power is off"; exit 1; fi\n'
        f'exec {cluster.NODE_SCRIPT} "$@"\n'
    )
    script.chmod(0o700)
    monkeypatch.setattr(cluster, "NODE_SCRIPT", str(script))
    with pytest.raises(cluster.ClusterError, match=r"n[12] ended(.*\n)*.*the power is off"):
        start_cluster("one")
    assert cluster.find(tmp_path / "one") is None
    assert cluster.find_daemons(tmp_path / "one") == {}


def test_a_path_that_munge_would_cut_is_refused(start_cluster: Start) -> None:
    with pytest.raises(cluster.ClusterError, match="too long a path"):
        start_cluster("x" * 90)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PROGRAMS", ("sh", "slurmctld-that-is-not-there"))
    if os.geteuid() == 0:
        with pytest.raises(cluster.Unsupported, match=r"not found: slurmctld-that-is-not-there; r"):
            cluster.check_support()


def test_an_ordinary_user_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(cluster.Unsupported, match="needs root"):
        cluster.check_support()


def test_the_network_is_not_one_that_the_host_uses(start_cluster: Start, tmp_path: Path) -> None:
    cluster.ip("link", "add", "occupied", "type", "bridge")
    try:
        cluster.ip("address", "add", "10.199.0.77/23", "dev", "occupied")
        cluster.ip("link", "set", "occupied", "up")
        addresses = (start_cluster("one").directory / "hosts").read_text()
    finally:
        cluster.ip("link", "delete", "occupied")
    assert "10.199.0." not in addresses and "10.199.1." not in addresses


def test_the_command_line_starts_uses_and_stops_a_cluster(
    start_cluster: Start, tmp_path: Path
) -> None:
    def call(verb: str, *command: str) -> str:
        argv = [
            sys.executable,
            str(cluster.HERE / "cluster.py"),
            verb,
            "--dir",
            str(tmp_path / "c"),
        ]
        done = subprocess.run([*argv, *command], capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    assert "start it: " in call("status")
    try:
        assert call("up") == f"export SLURM_CONF={tmp_path}/c/slurm.conf\n"
        assert call("run", "srun", "-N2", "sh", "-c", "echo hi") == "hi\nhi\n"
        status = call("status")
        assert all(f"{name}: up\n" in status for name in ("munged", "slurmctld", "n1", "n2"))
    finally:
        assert call("down") == ""
    assert cluster.find_daemons(tmp_path / "c") == {}
