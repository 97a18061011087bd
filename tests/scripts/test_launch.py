"""`make launch` with a fake sbatch: the exact command, and what is refused before it is run.

golden/*.txt are what --dry-run prints, TREE and IMAGE for their paths. After a change on purpose:
UPDATE_GOLDEN=1 tests/run.sh unit tests/scripts/test_launch.py, and read the difference.
"""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
SBATCH = f"""\
#!{sys.executable} -IS
import json, os, pathlib, sys
names = ("IMAGE", "SITE", "PROCS", "PYTORCH_DL_HPC")
seen = {{n: v for n, v in os.environ.items() if n in names or n.startswith("SBATCH_")}}
pathlib.Path(os.environ["FAKE_LOG"]).write_text(json.dumps([sys.argv[1:], seen]))
sys.stderr.write(os.environ.get("FAKE_ERROR", ""))
print(os.environ.get("FAKE_ID", "4711"))
sys.exit(int(os.environ.get("FAKE_CODE", "0")))
"""


@pytest.fixture
def login(host):
    """A login node with an image and a program."""
    host.program("sbatch", SBATCH)
    host.env["FAKE_LOG"] = str(host.log)
    host.output.parent.mkdir()
    host.output.touch()
    (host.tree / "train.py").write_text("print('hello')\n")
    return host


def launch(host, *options, job="mpi", script="train.py", **more):
    image = ["--image", host.output] if "--image" not in options else []
    return host.run("launch.py", "--job", job, f"--script={script}", *image, *options, **more)


def submitted(host):
    """What sbatch got: its arguments, and the variables that matter."""
    return json.loads(host.log.read_text())


def assert_refused(host, done, text, code=1):
    """One line, and sbatch was not called."""
    assert done.stderr == f"{text}\n"
    assert (done.returncode, done.stdout) == (code, "")
    assert not host.log.exists()


# ---- the command ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "job", "options"),
    [
        ("mpi", "mpi", ["--nodes=2", "--tasks=4", "--time=1-12:00:00"]),
        ("nccl", "nccl", ["--nodes=2", "--gpus=4", "--site=local"]),
        ("torchrun", "torchrun", ["--nodes=2", "--gpus=4", "--arguments=--lr 0.1 --name 'a b'"]),
        ("defaults", "nccl", []),
    ],
)
def test_the_command_is_the_golden_one(login, name, job, options):
    """nccl: a rank for each GPU. torchrun: a task for each node, PROCS ranks. No GPU, no flag."""
    done = launch(login, *options, "--dry-run", job=job)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout.replace(str(login.output), "IMAGE").replace(str(login.tree), "TREE")
    file = GOLDEN / f"launch-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.write_text(text)
    assert text == file.read_text()


def test_a_dry_run_submits_nothing(login):
    """And makes no directory; it needs no sbatch."""
    (login.bin / "sbatch").unlink()
    done = launch(login, "--dry-run", PATH="/nonexistent")
    assert done.returncode == 0
    assert not (login.tree / "logs").exists()
    assert not login.log.exists()


def test_what_is_printed_is_what_is_run(login):
    """The first line can be typed into a shell: the same words reach sbatch."""
    words = ["--x=a b", "it's", '"', "$(touch owned)", "`x`", "*", ";", "--", ""]
    done = launch(login, f"--arguments={shlex.join(words)}", "--gpus=2", job="torchrun")
    assert done.returncode == 0
    arguments, variables = submitted(login)
    assert arguments[-len(words) :] == words
    assert arguments[-len(words) - 1] == "train.py"
    line = shlex.split(done.stdout.splitlines()[0])
    assert line[line.index("sbatch") + 1 :] == arguments
    typed = dict(word.split("=", 1) for word in line[: line.index("sbatch")])
    assert typed == {n: v for n, v in variables.items() if not n.startswith("SBATCH_")}
    assert not (login.tree / "owned").exists()


@pytest.mark.parametrize(
    ("printed", "job"), [("4711", "4711"), ("4711;cluster", "4711"), ("4711\n", "4711")]
)
def test_the_job_id_and_where_its_output_will_be(login, printed, job):
    """--parsable prints `id` or `id;cluster`. The directory is made, as Slurm does not make it."""
    done = launch(login, FAKE_ID=printed)
    assert done.stdout.splitlines()[-1] == f"job {job}; output: logs/mpi-{job}.out"
    assert (login.tree / "logs").is_dir()


def test_a_relative_image_is_made_absolute(login):
    """The job may start elsewhere."""
    launch(login, "--image", os.path.relpath(login.output, login.tree))
    assert submitted(login)[1]["IMAGE"] == str(login.output)


# ---- sites ---------------------------------------------------------------------------------


def make_site(host, text):
    (host.tree / "scripts/sites/mine.sh").write_text(text)


def test_a_sites_defaults_reach_sbatch(login):
    make_site(login, "export SBATCH_PARTITION=gpu SBATCH_ACCOUNT='a b'\n")
    assert launch(login, "--site=mine").returncode == 0
    _, variables = submitted(login)
    assert variables["SITE"] == "mine"
    assert (variables["SBATCH_PARTITION"], variables["SBATCH_ACCOUNT"]) == ("gpu", "a b")


def test_what_a_site_prints_does_not_pass_for_the_job_id(login):
    """It is shown, on the other channel."""
    make_site(login, "echo 99; echo 98 >&2\n")
    done = launch(login, "--site=mine")
    assert done.stdout.splitlines()[-1] == "job 4711; output: logs/mpi-4711.out"
    assert done.stderr.splitlines() == ["99", "98"]


@pytest.mark.parametrize(("text", "code"), [("false\n", 1), ("if then\n", 1), ("exit 3\n", 3)])
def test_a_site_that_fails_submits_nothing(login, text, code):
    """Else the job would run without the site's account and partition, or fail after queueing."""
    make_site(login, text)
    done = launch(login, "--site=mine")
    assert done.returncode == 1
    assert done.stderr.startswith(f"launch: error: nothing was submitted (exit code {code}): ")
    assert len(done.stderr.splitlines()) == 1
    assert not login.log.exists()


# ---- sbatch's own words --------------------------------------------------------------------


def test_sbatch_s_refusal_is_passed_on(login):
    words = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job failed\n"
    done = launch(login, FAKE_ERROR=words, FAKE_CODE=1)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"launch: error: nothing was submitted (exit code 1): {' '.join(words.split())}\n"
    )
    assert "job 4711" not in done.stdout


def test_sbatch_s_warnings_are_passed_on(login):
    done = launch(login, FAKE_ERROR="sbatch: warning: can't honor --ntasks-per-node\n")
    assert done.returncode == 0
    assert done.stderr == "sbatch: warning: can't honor --ntasks-per-node\n"


def test_without_sbatch(login):
    """The machine that runs the tests may have one: so PATH is only bash's."""
    login.bin.joinpath("sbatch").unlink()
    login.bin.joinpath("bash").symlink_to(shutil.which("bash"))
    done = launch(login, PATH=login.bin)
    assert done.returncode == 1
    assert done.stderr == (
        "launch: error: no sbatch in PATH: launch on a login node of the cluster\n"
    )


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nodes=0"], "NODES=0: wanted 1 or more"),
        (["--nodes=-2"], "NODES=-2: wanted 1 or more"),
        (["--tasks=0"], "TASKS=0: wanted 1 or more"),
        (["--gpus=-1"], "GPUS=-1: wanted 0 or more"),
        (["--site=mars"], "SITE=mars is unknown; wanted one of: generic local"),
        (["--site="], "SITE= is unknown; wanted one of: generic local"),
        (["--arguments=it's"], "ARGS=it's: No closing quotation"),
        (["--image=no.sif"], "no image TREE/no.sif: run `make image` or `make pull IMAGE_URI=…`"),
    ],
)
def test_bad_values(login, options, text):
    """In the words of `make launch`, whose variables are typed."""
    done = launch(login, *options, *(["--image=no.sif"] if "--image" in options[0] else []))
    assert_refused(login, done, f"launch: error: {text.replace('TREE', str(login.tree))}")


@pytest.mark.parametrize("job", ["demo", "../jobs/mpi", ""])
def test_an_unknown_job(login, job):
    text = f"launch: error: JOB={job} is unknown; wanted one of: mpi nccl torchrun"
    assert_refused(login, launch(login, job=job), text)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("", "no SCRIPT: make launch SCRIPT=FILE, the Python program of the job"),
        ("no.py", "SCRIPT=no.py: no such file"),
        ("scripts", "SCRIPT=scripts: no such file"),
    ],
)
def test_a_missing_script(login, script, text):
    assert_refused(login, launch(login, script=script), f"launch: error: {text}")


@pytest.mark.parametrize("value", ["soon", "1:2:3:4", "1-", "-1", "1h", "1:00:00 x", ""])
def test_a_time_that_slurm_does_not_know(login, value):
    wanted = "wanted MINUTES, HH:MM:SS or D-HH:MM:SS (sbatch(1), --time)"
    assert_refused(
        login, launch(login, f"--time={value}"), f"launch: error: TIME={value}: {wanted}"
    )


@pytest.mark.parametrize("value", ["90", "90:30", "1:30:00", "1-0", "2-12:30", "1-0:0:1"])
def test_the_times_that_slurm_knows(login, value):
    """sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
    assert launch(login, f"--time={value}").returncode == 0
    assert f"--time={value}" in submitted(login)[0]


@pytest.mark.parametrize("option", ["--nodes=two", "--gpus=1.5", "--tasks=", "--nodes=1e3"])
def test_a_count_that_is_no_number(login, option):
    name, value = option.split("=")
    text = f"launch.py: error: argument {name}: invalid int value: '{value}' (--help lists all)"
    assert_refused(login, launch(login, option), text, code=2)


def test_misuse_is_one_line(login):
    done = login.run("launch.py")
    text = "the following arguments are required: --job, --script"
    assert_refused(login, done, f"launch.py: error: {text} (--help lists all)", code=2)


def test_a_script_with_the_line_ends_of_windows(login):
    """With the command that repairs it, also for a name with a space."""
    (login.tree / "my train.py").write_bytes(b"print(1)\r\n")
    text = "my train.py has Windows line ends (CRLF): sed -i 's/\\r$//' 'my train.py'"
    assert_refused(login, launch(login, script="my train.py"), f"launch: error: {text}")


def test_a_job_script_with_the_line_ends_of_windows(login):
    job = login.tree / "scripts/jobs/mpi.sbatch"
    job.write_bytes(job.read_bytes().replace(b"\n", b"\r\n"))
    done = launch(login)
    assert_refused(
        login,
        done,
        f"launch: error: {job} has Windows line ends (CRLF): sed -i 's/\\r$//' {job}",
    )


def test_sbatch_lines_that_slurm_would_ignore(login):
    """After the first command; comments and empty lines are none."""
    job = login.tree / "scripts/jobs/mine.sbatch"
    job.write_text(
        "#!/bin/bash\n\n# a comment\n#SBATCH --time=1\n\nmodule load x\n#SBATCH --nodes=2\n"
    )
    text = f"{job}:7: #SBATCH after a command; Slurm ignores it: move it up"
    assert_refused(login, launch(login, job="mine"), f"launch: error: {text}")
    job.write_text("#!/bin/bash\n\n# a comment\n#SBATCH --time=1\n\nmodule load x\n")
    assert launch(login, job="mine").returncode == 0


def test_a_place_where_no_logs_can_be_made(login):
    """Said in one line; nothing is submitted whose output would be lost."""
    (login.tree / "logs").write_text("a file")
    done = launch(login)
    assert done.returncode == 1
    assert done.stderr == "launch: error: logs: File exists\n"
    assert not login.log.exists()
