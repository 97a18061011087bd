"""The two-node cluster itself: what the tests of jobs and launchers take for granted."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from client import Slurm

pytestmark = pytest.mark.slurm

BOTH = ("-N2", "--ntasks-per-node=2")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

# Each rank writes a file: the lines of several ranks would mix.
WORLD = """
import json, os, pathlib, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
report = {"host": socket.gethostname(), "size": world.size, "sum": world.allreduce(world.rank + 1)}
name = f"{report['host']}-{os.getpid()}.json"
pathlib.Path(sys.argv[1], name).write_text(json.dumps(report))
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """Return a program that reports its MPI world into the directory it is given."""
    (tmp_path / "reports").mkdir()
    program = tmp_path / "world.py"
    program.write_text(WORLD)
    return program


def reports(world: Path) -> list[tuple[str, int, int]]:
    """Return the host, the world size and the sum of rank numbers + 1 that each rank saw."""
    loaded = [json.loads(file.read_text()) for file in (world.parent / "reports").iterdir()]
    return sorted((report["host"], report["size"], report["sum"]) for report in loaded)


WORLD_OF_FOUR = [(host, 4, 10) for host in ("n1", "n1", "n2", "n2")]


def test_both_nodes_are_idle(slurm: Slurm) -> None:
    assert slurm.cluster.idle_nodes() == {"n1", "n2"}


def test_tasks_are_placed_on_both_nodes(slurm: Slurm) -> None:
    done = slurm.run(["srun", *BOTH, "hostname"])
    assert sorted(done.stdout.split()) == ["n1", "n1", "n2", "n2"]


def test_nodes_are_machines_of_their_own(slurm: Slurm) -> None:
    script = """
        links=$(echo /sys/class/net/*)
        address=$(ip -4 -o address show eth0 | awk '{print $4}')
        namespaces=$(readlink /proc/self/ns/{net,uts,ipc,mnt,pid,cgroup} | tr '\\n' ' ')
        touch /dev/shm/$(hostname)
        echo "$links|$address|$namespaces|$(echo /dev/shm/n*)"
    """
    done = slurm.run(["srun", "-N2", "-n2", "--label", "bash", "-c", script])
    first, second = (line.split("|") for line in sorted(done.stdout.splitlines()))
    assert first[0].split()[1:] == ["/sys/class/net/eth0", "/sys/class/net/lo"]
    assert first[1].endswith(".1/24") and second[1].endswith(".2/24")
    ours = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt", "pid")}
    seen = [*ours, *first[2].split(), *second[2].split()]
    assert len(seen) == len(set(seen)) == 17
    assert (first[3], second[3]) == ("/dev/shm/n1", "/dev/shm/n2")


def test_nodes_reach_each_other_by_name(slurm: Slurm) -> None:
    script = """
import socket, os
if os.environ["SLURM_NODEID"] == "0":
    server = socket.create_server(("n1", 34567))
    server.settimeout(20)
    print(server.accept()[0].recv(9).decode(), end="")
else:
    for _ in range(200):
        try:
            socket.create_connection(("n1", 34567), 0.1).sendall(b"ping")
            break
        except OSError:
            __import__("time").sleep(0.1)
"""
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, "-c", script])
    assert done.stdout == "ping"


def test_nodes_share_files(slurm: Slurm, tmp_path: Path) -> None:
    slurm.run(["srun", *BOTH, "sh", "-c", "touch $(hostname).$SLURM_PROCID"], cwd=tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["n1.0", "n1.1", "n2.2", "n2.3"]


def test_fuse_is_usable_where_the_host_has_it(slurm: Slurm) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("this host has no /dev/fuse")
    slurm.run(["srun", "-N2", "-n2", "sh", "-c", "exec 3<>/dev/fuse"])


def test_srun_with_pmix_makes_one_world(slurm: Slurm, bare_mpi: Path, world: Path) -> None:
    program = [bare_mpi / "python", world, world.parent / "reports"]
    slurm.run(["srun", *BOTH, "--mpi=pmix", *program])
    assert reports(world) == WORLD_OF_FOUR


def test_srun_without_pmix_makes_worlds_of_one(slurm: Slurm, bare_mpi: Path, world: Path) -> None:
    """The trap: no --mpi=pmix, no error. Who launches MPI has to check the size of the world."""
    program = [bare_mpi / "python", world, world.parent / "reports"]
    done = slurm.run(["srun", *BOTH, *program])
    assert done.returncode == 0
    assert reports(world) == [(host, 1, 1) for host in ("n1", "n1", "n2", "n2")]


def test_mpirun_makes_one_world(slurm: Slurm, bare_mpi: Path, world: Path) -> None:
    program = [bare_mpi / "mpirun", bare_mpi / "python", world, world.parent / "reports"]
    job = slurm.submit(program, *BOTH, env=AS_ROOT)
    assert job.wait().state == "COMPLETED", job.explain()
    assert reports(world) == WORLD_OF_FOUR


def test_the_exit_code_of_a_failing_rank_is_passed_on(slurm: Slurm) -> None:
    command = ["srun", *BOTH, "bash", "-c", "exit $((SLURM_PROCID == 3 ? 7 : 0))"]
    assert slurm.run(command, check=False).returncode == 7
    job = slurm.submit(command, *BOTH)
    ending = job.wait()
    assert (ending.state, ending.exit_code) == ("FAILED", 7), job.explain()


def test_kill_on_bad_exit_ends_the_other_ranks(slurm: Slurm) -> None:
    """srun tells the highest exit code, here that of the ranks it ended by SIGTERM, not 7."""
    rank = "if [ $SLURM_PROCID -eq 3 ]; then exit 7; fi; sleep 100"
    job = slurm.submit(["srun", *BOTH, "--kill-on-bad-exit=1", "bash", "-c", rank], *BOTH)
    ending = job.wait(30)
    assert (ending.state, ending.exit_code) == ("FAILED", 128 + signal.SIGTERM), job.explain()
    job.wait_until_gone()


def test_a_signal_that_ends_a_job_is_told(slurm: Slurm) -> None:
    job = slurm.submit(["bash", "-c", "kill -USR2 $$"])
    assert job.wait().exit_code == 128 + signal.SIGUSR2, job.explain()
    job = slurm.submit("#!/bin/bash\nkill -USR2 $$\n")
    assert job.wait().signal == signal.SIGUSR2, job.explain()


def test_a_signal_reaches_the_batch_script(slurm: Slurm) -> None:
    script = (
        "#!/bin/bash\ntrap 'echo got it; exit 3' USR1\necho ready\nwhile :; do sleep 0.1; done\n"
    )
    job = slurm.submit(script)
    job.wait_until(lambda: "ready" in job.output(), "a trap")
    job.cancel("--batch", "--signal=USR1")
    assert job.wait(20).exit_code == 3, job.explain()
    assert "got it" in job.output()


def test_scancel_leaves_no_process(slurm: Slurm) -> None:
    """Not even those that ignore SIGTERM, left their session or dropped their environment."""
    rank = "trap '' TERM; setsid sleep 301 & env -i setsid sleep 302 & sleep 303"
    job = slurm.submit(["srun", *BOTH, "bash", "-c", rank], *BOTH)
    names = ["sleep 301", "sleep 302", "sleep 303"]

    def sleepers() -> list[str]:
        return sorted(cmd for cmd in slurm.processes(job.id).values() if cmd in names)

    job.wait_until(lambda: sleepers() == sorted(names * 4), "twelve sleepers", 20)
    job.cancel()
    assert job.wait(30).state == "CANCELLED"
    job.wait_until_gone()


def test_gpus_are_handed_out(slurm: Slurm) -> None:
    show = (
        "echo $SLURM_JOB_ID $(hostname) $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS $SLURM_GPUS_ON_NODE"
    )
    job = slurm.submit(
        ["bash", "-c", f"echo $SLURM_JOB_GPUS; srun bash -c '{show}'"],
        "--gpus-per-node=2",
        "-N2",
        "-n2",
    )
    assert job.wait().state == "COMPLETED", job.explain()
    batch, *steps = job.output().splitlines()
    assert batch == "0,1"
    assert sorted(steps) == [f"{job.id} n1 0,1 0,1 2", f"{job.id} n2 0,1 0,1 2"]


def test_a_gpu_belongs_to_one_job(slurm: Slurm) -> None:
    jobs = [
        slurm.submit(["bash", "-c", "echo $SLURM_JOB_GPUS; sleep 100"], "--gpus-per-node=1", "-wn1")
        for _ in range(3)
    ]
    for job in jobs[:2]:
        job.wait_until(job.output, "output")
    assert sorted(job.output() for job in jobs[:2]) == ["0\n", "1\n"]
    assert jobs[2].state() == "PENDING"


def test_a_task_sees_no_gpu_without_asking(slurm: Slurm) -> None:
    done = slurm.run(["srun", "bash", "-c", "echo ${CUDA_VISIBLE_DEVICES-none}"])
    assert done.stdout == "none\n"


def test_the_controller_listens_to_the_cluster_only(slurm: Slurm) -> None:
    conf = (slurm.cluster.directory / "slurm.conf").read_text()
    port = int(conf.split("SlurmctldPort=")[1].split()[0])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_files_are_for_the_owner_only(slurm: Slurm) -> None:
    directories = [path for path in slurm.cluster.directory.iterdir() if path.is_dir()]
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in directories} == {
        path.name: "0o0" for path in directories
    }
