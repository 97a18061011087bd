#!/usr/bin/env python3
"""Check and submit a job (`make launch`): JOB chooses scripts/jobs/JOB.sbatch, SITE its cluster.

Prints the exact sbatch command and the job id. Bad input is refused before anything is submitted.
Standard library only, Python 3.8 or newer: it runs on login nodes.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

from options import Parser

ROOT = Path(__file__).resolve().parent.parent


class LaunchError(Exception):
    """A job cannot be submitted as asked; the text says why and what to type."""


class Request(NamedTuple):
    """What the user asked for; counts are per node."""

    job: str
    script: Path
    arguments: List[str]
    image: Path
    site: str
    nodes: int
    gpus: int
    tasks: int
    time: Optional[str]


class Submission(NamedTuple):
    """What is run: sbatch's arguments, and what the job script reads from its environment."""

    command: List[str]
    environment: Dict[str, str]

    def text(self) -> str:
        """The command as a line to type in a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(variables + [shlex.quote(word) for word in self.command])


def names(directory: Path, suffix: str) -> List[str]:
    return sorted(path.stem for path in directory.glob(f"*{suffix}"))


def check(request: Request, root: Path = ROOT) -> None:
    """Refuse what would only fail once the job runs, hours of queueing later.

    Raises LaunchError with what was seen, what was wanted and what to type.
    """
    jobs, sites = names(root / "scripts/jobs", ".sbatch"), names(root / "scripts/sites", ".sh")
    if request.job not in jobs:
        raise LaunchError(f"JOB={request.job} is unknown; wanted one of: {' '.join(jobs)}")
    if request.site not in sites:
        raise LaunchError(f"SITE={request.site} is unknown; wanted one of: {' '.join(sites)}")
    for name, value, least in (
        ("NODES", request.nodes, 1),
        ("TASKS", request.tasks, 1),
        ("GPUS", request.gpus, 0),
    ):
        if value < least:
            raise LaunchError(f"{name}={value}: wanted {least} or more")
    if request.time is not None and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", request.time):
        raise LaunchError(
            f"TIME={request.time}: wanted MINUTES, HH:MM:SS or D-HH:MM:SS (sbatch(1), --time)"
        )
    if not request.image.is_file():
        raise LaunchError(f"no image {request.image}: run `make image` or `make pull IMAGE_URI=…`")
    if not request.script.name:
        raise LaunchError("no SCRIPT: make launch SCRIPT=FILE, the Python program of the job")
    if not request.script.is_file():
        raise LaunchError(f"SCRIPT={request.script}: no such file")
    for path in (request.script, root / "scripts/jobs" / f"{request.job}.sbatch"):
        check_text(path)


def check_text(path: Path) -> None:
    """Line ends of Windows, and #SBATCH lines that Slurm would silently ignore."""
    content = path.read_bytes()
    if b"\r\n" in content:
        raise LaunchError(
            f"{path} has Windows line ends (CRLF): sed -i 's/\\r$//' {shlex.quote(str(path))}"
        )
    if path.suffix != ".sbatch":
        return
    commands_began = False
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        if line.startswith("#SBATCH") and commands_began:
            raise LaunchError(
                f"{path}:{number}: #SBATCH after a command; Slurm ignores it: move it up"
            )
        commands_began = commands_began or (bool(line.strip()) and not line.startswith("#"))


def compose(request: Request, root: Path = ROOT) -> Submission:
    """The sbatch command for a request."""
    tasks = 1 if request.job == "torchrun" else request.tasks
    command = ["sbatch", "--parsable", f"--nodes={request.nodes}", f"--ntasks-per-node={tasks}"]
    if request.gpus:
        command.append(f"--gpus-per-node={request.gpus}")
    if request.time:
        command.append(f"--time={request.time}")
    command += [
        str(root / "scripts/jobs" / f"{request.job}.sbatch"),
        str(request.script),
        *request.arguments,
    ]
    environment = {"PYTORCH_DL_HPC": str(root), "IMAGE": str(request.image), "SITE": request.site}
    if request.job == "torchrun":
        environment["PROCS"] = str(request.tasks)
    return Submission(command, environment)


def submit(submission: Submission, site: Path) -> str:
    """Submit with the site's SBATCH_* variables; returns the job id.

    Raises LaunchError with sbatch's own words where it refuses.
    """
    if shutil.which("sbatch") is None:
        raise LaunchError("no sbatch in PATH: launch on a login node of the cluster")
    Path("logs").mkdir(exist_ok=True)  # Slurm drops the output of a job whose directory is missing
    # The site file is shell, so a shell reads it. Its own output must not pass for a job id.
    done = subprocess.run(
        [
            "bash",
            "-c",
            'source "$1" >&2 || { echo "$1 failed (exit code $?)" >&2; exit 1; }; shift; exec "$@"',
            "launch",
            str(site),
            *submission.command,
        ],
        env={**os.environ, **submission.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(done.stderr.split())
        raise LaunchError(f"nothing was submitted (exit code {done.returncode}): {words}")
    sys.stderr.write(done.stderr)  # sbatch's warnings, and what the site file says
    return done.stdout.strip().split(";")[0]


def parse(arguments: Optional[Sequence[str]] = None) -> "tuple[Request, bool]":
    parser = Parser(prog="launch.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--job", required=True, help=" | ".join(names(ROOT / "scripts/jobs", ".sbatch"))
    )
    parser.add_argument("--script", required=True, type=Path, help="the Python program")
    parser.add_argument("--arguments", default="", help="its arguments, as in a shell")
    parser.add_argument("--image", type=Path, default=ROOT / "build/Pytorch_DL_HPC-cpu.sif")
    parser.add_argument(
        "--site", default="generic", help=" | ".join(names(ROOT / "scripts/sites", ".sh"))
    )
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per node (default: none)")
    parser.add_argument("--tasks", type=int, help="ranks per node (default: one for each GPU)")
    parser.add_argument("--time", help="time limit (default: the job script's)")
    parser.add_argument("--dry-run", action="store_true", help="print the command, submit nothing")
    given = parser.parse_args(arguments)
    try:
        words = shlex.split(given.arguments)
    except ValueError as error:
        raise LaunchError(f"ARGS={given.arguments}: {error}") from None
    tasks = given.tasks if given.tasks is not None else max(given.gpus, 1)
    request = Request(
        given.job,
        given.script,
        words,
        given.image.absolute(),
        given.site,
        given.nodes,
        given.gpus,
        tasks,
        given.time,
    )
    return request, given.dry_run


def main(arguments: Optional[Sequence[str]] = None) -> int:
    try:
        request, dry_run = parse(arguments)
        check(request)
        submission = compose(request)
        print(submission.text(), flush=True)
        if not dry_run:
            job = submit(submission, ROOT / "scripts/sites" / f"{request.site}.sh")
            print(f"job {job}; output: logs/{request.job}-{job}.out")
    except (LaunchError, OSError) as error:
        named = isinstance(error, OSError) and error.filename
        text = f"{error.filename}: {error.strerror}" if named else error
        print(f"launch: error: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
