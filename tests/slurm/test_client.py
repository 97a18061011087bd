"""What the other tests use to submit and to wait: it must fail when it should, and say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from client import Slurm
from cluster import wait_until

pytestmark = pytest.mark.slurm


def test_a_batch_script_gets_its_arguments(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "greet.sbatch"
    script.write_text('#!/bin/bash\n#SBATCH --output=%x.log --job-name=greeting\necho "hi $1"\n')
    job = slurm.submit(script, arguments=["you"], cwd=tmp_path)
    assert job.wait().state == "COMPLETED", job.explain()
    assert job.output() == "hi you\n"
    assert (tmp_path / "greeting.log").exists()


def test_error_output_kept_apart_is_part_of_the_output(slurm: Slurm) -> None:
    job = slurm.submit(["bash", "-c", "echo one >&2; echo two"], "--error=%j.err")
    assert job.wait().state == "COMPLETED", job.explain()
    assert job.output() == "two\none\n"


def test_a_client_does_not_see_the_job_around_the_tests(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("PMIX_RANK", "3")
    script = "echo $SLURM_NTASKS $SAID ${PMIX_RANK-}"
    assert slurm.run(["srun", "sh", "-c", script], env={"SAID": "x"}).stdout == "1 x\n"


def test_a_failing_client_is_an_error_with_the_logs(slurm: Slurm) -> None:
    command = ["srun", "bash", "-c", "echo out; echo err >&2; exit 4"]
    with pytest.raises(AssertionError) as error:
        slurm.run(command)
    for part in ("exit status 4", "\n--- out\n", "err\n", "slurmctld: ", "slurmd-n1: "):
        assert part in str(error.value)
    assert slurm.run(command, check=False).returncode == 4


def test_a_client_without_an_end_is_stopped_with_its_job(slurm: Slurm) -> None:
    with pytest.raises(AssertionError, match=r"timed out after 1 seconds\n--- started\n"):
        slurm.run(["srun", "bash", "-c", "echo started; exec sleep 100"], timeout=1)
    wait_until(lambda: not slurm.cluster.ask("squeue", "-h"), "an empty queue", 10)


def test_a_test_may_leave_a_job(slurm: Slurm) -> None:
    slurm.submit(["sleep", "100"])
    assert slurm.cluster.ask("squeue", "-h")


def test_the_job_of_the_test_before_is_gone(slurm: Slurm) -> None:
    assert slurm.cluster.ask("squeue", "-h") == ""


def test_a_missed_deadline_shows_record_output_and_logs(slurm: Slurm) -> None:
    job = slurm.submit(["bash", "-c", "echo hello; sleep 100"])
    job.wait_until(job.output, "output")
    with pytest.raises(AssertionError) as error:
        job.wait(timeout=0.2)
    for part in ("JobState=RUNNING", "output:\nhello\n", "sleep 100", "slurmctld: ", "slurmd-n1: "):
        assert part in str(error.value)


def test_a_process_that_escaped_from_slurm_is_noticed(slurm: Slurm) -> None:
    escape = "echo $BASHPID >/sys/fs/cgroup/freezer/cgroup.procs; exec setsid sleep 304"
    job = slurm.submit(["bash", "-c", f"({escape}) >/dev/null 2>&1 & sleep 0.5"])
    assert job.wait().state == "COMPLETED", job.explain()
    escaped = slurm.processes(job.id)
    assert list(escaped.values()) == ["sleep 304"]
    with pytest.raises(AssertionError, match="sleep 304"):
        job.wait_until_gone(timeout=0.5)
    os.kill(next(iter(escaped)), signal.SIGKILL)
    job.wait_until_gone()


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_without_slurm_tests_are_skipped_but_fail_in_ci(ci: str, outcome: str) -> None:
    tests = Path(__file__).with_name("test_cluster.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tests, "-k", "idle"]
    done = subprocess.run(
        command, env={**os.environ, "PATH": "/nowhere", "CI": ci}, capture_output=True, text=True
    )
    assert outcome in done.stdout
    assert "no Slurm cluster: " in done.stdout
