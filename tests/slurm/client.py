"""What tests do with the cluster: submit jobs, wait for them, and see what they leave behind.

Every wait has a deadline, and what it raises shows the job's record, its output and the ends of
the daemons' logs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster, ClusterError, tail_logs, wait_until

# A job that is COMPLETING still has processes; a requeued one is PENDING again.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Ending:
    """How a job ended, as `scontrol show job` tells it."""

    state: str
    exit_code: int
    signal: int


@dataclass(frozen=True)
class Slurm:
    """The running cluster and the directory in which tests work by default."""

    cluster: Cluster
    directory: Path

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client such as srun on the host; with `check`, a failure is an error."""
        command = [str(word) for word in argv]
        try:
            return subprocess.run(
                command,
                env={**self.cluster.environment(), **(env or {})},
                cwd=cwd or self.directory,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=check,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = [as_text(error.stdout), as_text(error.stderr), tail_logs(self.cluster.directory)]
            raise AssertionError("\n--- ".join([str(error), *said])) from None

    def submit(
        self,
        script: Path | str | Sequence[str | Path],
        *sbatch_options: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Submit a script's file (with `arguments`), a script's text, or a command."""
        work = cwd or self.directory
        if isinstance(script, str):
            text, script = script, work / f"job-{os.urandom(4).hex()}.sh"
            script.write_text(text)
        if isinstance(script, Path):
            what = [str(script), *arguments]
        else:
            what = ["--wrap", shlex.join(str(word) for word in script)]
        done = self.run(["sbatch", "--parsable", *sbatch_options, *what], env=env, cwd=work)
        return Job(self, int(done.stdout.split(";")[0]))

    def processes(self, job_id: int) -> dict[int, str]:
        """Return the job's processes on the nodes: their ids on the host, and their commands.

        Slurm follows them by their cgroup. A process that escaped from it still has the variables.
        """
        name = self.cluster.name
        group = re.compile(rf"/{name}/.*/job_{job_id}(/|$)", re.MULTILINE)
        variables = {f"SLURM_JOB_ID={job_id}".encode(), f"SLURM_CLUSTER_NAME={name}".encode()}
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = variables <= set((process / "environ").read_bytes().split(b"\0"))
                if ours or group.search((process / "cgroup").read_text()):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = command.decode(errors="replace").strip()
        return found

    def cancel_all(self) -> None:
        """Cancel every job and wait until the queue is empty."""
        jobs = self.cluster.ask("squeue", "-h", "-o", "%i").split()
        if jobs:
            self.run(["scancel", *jobs])
        last = max(map(int, jobs), default=0)
        Job(self, last).wait_until(lambda: not self.cluster.ask("squeue", "-h"), "an empty queue")


@dataclass(frozen=True)
class Job:
    """A job by its number."""

    slurm: Slurm
    id: int

    def record(self) -> dict[str, str]:
        """Return the job's record, as `scontrol show job` prints it."""
        text = self.slurm.cluster.ask("scontrol", "-o", "show", "job", str(self.id))
        return dict(re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|$)", text))

    def wait(self, timeout: float = 60) -> Ending:
        """Wait for the job's end, which includes that of its processes."""
        record: dict[str, str] = {}

        def has_ended() -> bool:
            record.update(self.record())
            return record.get("JobState") in ENDED

        self.wait_until(has_ended, "its end", timeout)
        exit_code, signal = record["ExitCode"].split(":")
        return Ending(record["JobState"], int(exit_code), int(signal))

    def state(self) -> str:
        """Return the job's state, such as RUNNING; "" if Slurm knows no such job."""
        return self.record().get("JobState", "")

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 60) -> None:
        """Wait for a condition on the job."""
        try:
            wait_until(condition, f"job {self.id}: {what}", timeout)
        except ClusterError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from None

    def wait_until_gone(self, timeout: float = 15) -> None:
        """Wait until no process of the job is left on any node."""
        self.wait_until(lambda: not self.slurm.processes(self.id), "no process left", timeout)

    def output(self) -> str:
        """Return what the job has printed so far, its error output last if that is kept apart."""
        record = self.record()
        default = Path(record.get("WorkDir", "."), f"slurm-{self.id}.out")
        out = Path(record.get("StdOut", default))
        files = dict.fromkeys([out, Path(record.get("StdErr", out))])
        return "".join(file.read_text(errors="replace") for file in files if file.is_file())

    def cancel(self, *scancel_options: str) -> None:
        """Cancel the job, or send it a signal: `job.cancel("--batch", "--signal=USR1")`."""
        self.slurm.run(["scancel", *scancel_options, str(self.id)])

    def explain(self) -> str:
        """Return all there is to know about the job, for the message of a failed test."""
        record = "\n".join(f"{key}={value}" for key, value in self.record().items())
        left = "\n".join(f"{pid} {cmd}" for pid, cmd in self.slurm.processes(self.id).items())
        return (
            f"--- job {self.id}, record:\n{record}\n--- output:\n{self.output()}\n"
            f"--- processes:\n{left}\n{tail_logs(self.slurm.cluster.directory)}"
        )


def as_text(output: str | bytes | None) -> str:
    """Return the output of a client that was stopped; subprocess gives it as bytes."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
