"""scripts/jobs/common.sh: container flags, MPI choice, hygiene; with fake programs in PATH."""

import os
import subprocess

import pytest

# One element of the array a line, so that words stay words.
SHOW = 'printf "%s\\n" "${CONTAINER[@]}"'


@pytest.fixture
def node(host):
    """A compute node with an image; the machine's own srun and mpirun are out of sight."""
    host.output.parent.mkdir()
    host.output.touch()
    for tool in ("bash", "cat", "dirname", "grep", "hostname"):
        (host.bin / tool).symlink_to(f"/usr/bin/{tool}")
    host.env["PATH"] = str(host.bin)
    del host.env["TMPDIR"]
    return host


def run(node, code, *arguments, cwd=None, **env):
    """Source common.sh in a job script's shell and go on with `code`."""
    return subprocess.run(
        ["bash", "-c", f'source "{node.tree}/scripts/jobs/common.sh"; {code}', "job", *arguments],
        cwd=str(cwd or node.tree),
        env={**node.env, **{name: str(value) for name, value in env.items()}},
        capture_output=True,
        text=True,
    )


def container(node, *arguments, **options):
    """CONTAINER after set_container, without the driver's flag of a machine that has one."""
    no_driver = "has_nvidia_driver() { false; }"
    done = run(node, f'{no_driver}; set_container "$@"; {SHOW}', *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_refused(done, text):
    """One line, named after the job script."""
    assert done.stderr == f"job: error: {text}\n"
    assert done.returncode == 1


# ---- the container's flags -----------------------------------------------------------------


def test_the_working_directory_is_bound_and_kept(node):
    assert container(node) == [
        f"{node.bin}/apptainer", "exec", "--bind", f"{node.tree}", "--pwd", f"{node.tree}",
        f"{node.output}",
    ]  # fmt: skip


def test_the_real_path_of_a_working_directory_that_is_a_link(node, tmp_path):
    """With the link's name the process would start in $HOME."""
    (tmp_path / "real dir").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real dir")
    words = container(node, cwd=tmp_path / "link", PWD=tmp_path / "link")
    assert words[2:6] == ["--bind", f"{tmp_path}/real dir", "--pwd", f"{tmp_path}/real dir"]


def test_the_directory_of_the_script_is_bound_too(node, tmp_path):
    """By its real path. Options of python (-m, -c) are no files."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "code")
    words = container(node, tmp_path / "link/train.py", "--epochs")
    assert words[6:8] == ["--bind", f"{tmp_path}/code"]
    assert container(node, "-m", "hpcdist") == container(node)


def test_a_script_that_is_missing(node):
    assert_refused(run(node, "set_container x.py"), "no script x.py: make launch SCRIPT=FILE")


def test_further_binds_are_passed_as_they_are(node):
    words = container(node, BINDS="/scratch,/data:/mnt:ro")
    assert words[-3:] == ["--bind", "/scratch,/data:/mnt:ro", f"{node.output}"]


def test_the_batch_systems_scratch_is_bound_where_it_is_there(node):
    """A bind to a missing path would be fatal."""
    words = container(node, TMPDIR=node.temporary)
    assert words[-3:] == ["--bind", f"{node.temporary}", f"{node.output}"]
    assert container(node, TMPDIR="/nonexistent") == container(node)


@pytest.mark.parametrize("driver", [True, False])
def test_nv_only_where_a_driver_is(node, driver):
    """Without one --nv binds host libraries in and says nothing."""
    code = f"has_nvidia_driver() {{ {str(driver).lower()}; }}; set_container; {SHOW}"
    assert ("--nv" in run(node, code).stdout.splitlines()) is driver


def test_the_driver_is_seen_by_its_files(node):
    """What this machine has: the question is asked of the kernel, not of nvidia-smi."""
    has_one = any(map(os.path.exists, ("/dev/nvidiactl", "/proc/driver/nvidia/version")))  # noqa: PTH110
    node.program("nvidia-smi", "exit 0")
    assert run(node, "has_nvidia_driver").returncode == (0 if has_one else 1)


def test_singularity_where_apptainer_is_not_in_path(node):
    (node.bin / "apptainer").rename(node.bin / "singularity")
    assert container(node)[0] == f"{node.bin}/singularity"


def test_no_runtime(node):
    (node.bin / "apptainer").unlink()
    assert_refused(
        run(node, "set_container"),
        "no apptainer or singularity in PATH: load the module in scripts/sites/generic.sh,"
        " or run `make setup`",
    )


def test_no_image(node):
    """The default is the tree's cpu flavour; IMAGE overrules it."""
    node.output.unlink()
    remedy = "run `make image` or `make pull IMAGE_URI=…`"
    assert_refused(run(node, "set_container"), f"no image {node.output}: {remedy}")
    assert_refused(run(node, "set_container", IMAGE="x.sif"), f"no image x.sif: {remedy}")


def test_an_image_with_a_space_is_one_word(node):
    image = node.output.rename(node.output.with_name("my image.sif"))
    assert container(node, IMAGE=image)[-1] == str(image)


# ---- what starts MPI ranks -----------------------------------------------------------------

WITH_PMIX = 'echo "MPI plugin types are..."; printf "\\t%s\\n" none pmix pmi2'
WITHOUT_PMIX = 'echo "MPI plugin types are..."; printf "\\t%s\\n" none pmi2 notpmix'


@pytest.mark.parametrize(
    ("srun", "mpirun", "env", "chosen"),
    [
        (WITH_PMIX, True, {"SLURM_JOB_ID": "1"}, "pmix (srun --mpi=list has pmix)"),
        (f"({WITH_PMIX}) >&2", False, {"SLURM_JOB_ID": "1"}, "pmix (srun --mpi=list has pmix)"),
        (WITHOUT_PMIX, True, {"SLURM_JOB_ID": "1"}, "mpirun (srun has no pmix; mpirun of the host"),
        ("exit 1", True, {"SLURM_JOB_ID": "1"}, "mpirun (srun has no pmix; mpirun of the host is"),
        (None, True, {}, "mpirun (srun has no pmix; mpirun of the host is"),
        (WITH_PMIX, True, {"MPI": "mpirun"}, "mpirun (MPI=mpirun is set)"),
        (WITHOUT_PMIX, False, {"MPI": "pmix"}, "pmix (MPI=pmix is set)"),
    ],
)
def test_the_choice_and_its_reason(node, srun, mpirun, env, chosen):
    """srun's pmix inside a job, else the host's mpirun; what the user sets is not doubted."""
    if srun:
        node.program("srun", f"[[ $1 == --mpi=list ]] || exit 9\n{srun}")
    if mpirun:
        node.program("mpirun", "")
    done = run(node, 'choose_mpi; echo "$MPI"', **env)
    assert done.returncode == 0, done.stderr
    said, mpi = done.stdout.splitlines()
    assert said.startswith(f"MPI ranks are started by {chosen}")
    assert mpi == chosen.split()[0]


def test_a_long_list_of_srun_is_read_to_its_end(node):
    """Under pipefail a grep that stops at its first match makes srun fail, and so the choice."""
    node.program("srun", f"{WITH_PMIX}; for i in {{1..20000}}; do echo $i; done")
    for _ in range(5):
        done = run(node, "choose_mpi", SLURM_JOB_ID="1")
        assert done.stdout == "MPI ranks are started by pmix (srun --mpi=list has pmix)\n"


def test_nothing_that_could_start_ranks(node):
    node.program("srun", WITHOUT_PMIX)
    assert_refused(
        run(node, "choose_mpi", SLURM_JOB_ID="1"),
        "neither `srun --mpi=pmix` nor a host mpirun: load an Open MPI module in"
        " scripts/sites/generic.sh",
    )


def test_an_unknown_choice(node):
    done = run(node, "choose_mpi", MPI="mvapich")
    assert_refused(done, "MPI=mvapich is unknown: MPI=pmix or MPI=mpirun")


# ---- the site ------------------------------------------------------------------------------


def test_a_site_sets_up_the_node(node):
    """Its function runs, and what it exports counts for the container."""
    (node.tree / "scripts/sites/mine.sh").write_text("site_setup() { BINDS=/scratch; }\n")
    done = run(node, f"load_site; set_container; {SHOW}", SITE="mine")
    assert done.stdout.splitlines()[-3:] == ["--bind", "/scratch", f"{node.output}"]


def test_a_site_without_setup_is_fine(node):
    for site in ("generic", "local"):
        done = run(node, "load_site", SITE=site)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_site_is_answered_with_the_known_ones(node):
    done = run(node, "load_site", SITE="mars")
    assert done.returncode == 1
    assert done.stderr.startswith("job: error: SITE=mars is unknown: wanted one of: generic local")


def test_a_site_setup_that_fails_ends_the_job(node):
    (node.tree / "scripts/sites/mine.sh").write_text("site_setup() { false; true; }\n")
    done = run(node, "load_site; echo goes on", SITE="mine")
    assert (done.returncode, done.stdout) == (1, "")


# ---- the environment -----------------------------------------------------------------------


def test_the_hosts_python_stays_outside(node):
    names = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX")
    done = run(node, "clean_environment; export -p", **dict.fromkeys(names, "/x"))
    assert not any(name in done.stdout for name in names)
    assert 'PYTHONNOUSERSITE="1"' in done.stdout


@pytest.mark.parametrize(
    ("env", "threads", "srun_cpus"),
    [
        ({}, "1", ""),
        ({"SLURM_CPUS_PER_TASK": "8"}, "8", "8"),
        ({"SLURM_CPUS_PER_TASK": "8", "OMP_NUM_THREADS": "2"}, "2", "8"),
    ],
)
def test_a_thread_for_each_core_of_the_task(node, env, threads, srun_cpus):
    """And srun is told the number again, which it does not inherit."""
    code = "clean_environment; bash -c 'echo $OMP_NUM_THREADS,${SRUN_CPUS_PER_TASK:-}'"
    assert run(node, code, **env).stdout == f"{threads},{srun_cpus}\n"


def test_a_job_says_what_it_runs_with(node):
    done = run(node, "prepare_job", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]")
    assert done.stdout == f"job 7 on n[1-2], image {node.output}, site generic\n"


def test_an_unset_variable_and_a_failing_command_end_a_job(node):
    """Whatever a job script does after `source` is under `set -euo pipefail`."""
    for code in ("echo $UNSET; echo goes on", "false; echo goes on", "false | true; echo goes on"):
        done = run(node, code)
        assert done.returncode != 0
        assert "goes on" not in done.stdout
