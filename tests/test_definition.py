"""Singularity.def and its locks, read as text; labels and help of the image that was built."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Singularity.def").read_text()
LOCKS = sorted((ROOT / "payload" / "requirements").glob("*.txt"))
IMAGE = Path(os.environ.get("IMAGE") or ROOT / "build" / "Pytorch_DL_HPC-cpu.sif")
SECTIONS = (
    "arguments", "environment", "files", "help", "labels", "post", "runscript", "test",
)  # fmt: skip


def section(name):
    found = re.search(rf"(?ms)^%{name}\b[^\n]*\n(.*?)(?=^%|\Z)", TEXT)
    assert found, f"no %{name}"
    return found.group(1)


def arguments():
    """%arguments: the names and their defaults."""
    return dict(re.findall(r"^\s+([A-Z_]+)=(.*)$", section("arguments"), re.M))


# ---- the definition ------------------------------------------------------------------------


def test_all_sections_are_there_once():
    assert sorted(re.findall(r"^%(\w+)", TEXT, re.M)) == list(SECTIONS)


def test_no_section_line_has_what_apptainer_takes_for_a_part_of_its_name():
    """`%files<TAB>` is an "invalid section"; trailing blanks are no better."""
    lines = re.findall(r"^[ \t]*%.*$", TEXT, re.M)
    assert [line for line in lines if not re.fullmatch(r"%[a-z]+( -c /bin/bash)?", line)] == []
    assert "\t" not in TEXT


def test_every_argument_has_a_default_and_is_used_and_no_other_is():
    """Apptainer refuses a build where one is unknown or unused."""
    used = set(re.findall(r"\{\{\s*([A-Z_]+)\s*\}\}", TEXT))
    assert used == set(arguments())
    assert all(arguments().values())


def test_the_plain_build_of_the_header_comment_has_working_defaults():
    """`apptainer build x.sif Singularity.def`: from Docker Hub, the whole image, flavour cpu."""
    values = arguments()
    assert (values["BOOTSTRAP"], values["FROM"]) == ("docker", f"debian:{values['SUITE']}-slim")
    assert (values["LAYER"], values["FLAVOUR"]) == ("all", "cpu")
    assert (ROOT / f"payload/requirements/{values['FLAVOUR']}.txt").is_file()


def test_no_index_or_mirror_is_named_but_pytorchs_own():
    """Those of a site come from its settings, by way of host.env."""
    urls = re.findall(r"\w+://[^\s\"'{}$]+", TEXT)
    assert set(urls) == {"https://download.pytorch.org/whl/"}


def test_a_value_that_the_host_sets_is_not_a_part_of_the_image():
    """host.env is read from /mnt, a bind of the build; nothing copies it."""
    assert re.search(r"^\s+if \[ -f /mnt/host\.env \]; then \. /mnt/host\.env;", TEXT, re.M)
    assert "host.env" not in section("files") + section("environment")
    assert "/mnt" not in section("environment") + section("runscript") + section("test")


def test_bash_reads_the_scripts():
    """Syntax of %post (bash), and of the others, which Apptainer runs by sh."""
    for name in ("post", "environment", "runscript", "test"):
        shell = "bash" if name == "post" else "sh"
        text = re.sub(r"\{\{\s*\w+\s*\}\}", "x", section(name))
        done = subprocess.run([shell, "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), name


# ---- the locks -----------------------------------------------------------------------------


def requirements(lock):
    """name==version → its hashes."""
    text = re.sub(r"(?m)^\s*#.*\n?", "", lock.read_text()).replace("\\\n", " ")
    found = {}
    for line in filter(str.strip, text.splitlines()):
        name, *options = line.split("#")[0].split()
        found[name] = options
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_line_of_a_lock_is_pinned_and_has_hashes(lock):
    found = requirements(lock)
    assert found
    for name, hashes in found.items():
        assert re.fullmatch(r"[a-z\d._-]+==[a-z\d.+!]+", name), name
        assert hashes, f"{name} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[\da-f]{64}", word) for word in hashes), name


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_no_lock_names_an_index(lock):
    """Hosts have their own; `pip install -r` would follow such a line."""
    lines = [line for line in lock.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert not any("://" in line or re.match(r"\s*-(?!-hash)", line) for line in lines)


def test_the_cpu_flavour_can_only_be_the_cpu_build():
    """The version says +cpu, and the hashes admit PyTorch's wheels for CPython 3.11 only."""
    torch = requirements(ROOT / "payload/requirements/torch-cpu.txt")
    assert torch == {
        "torch==2.13.0+cpu": [
            "--hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
            "--hash=sha256:84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        ]
    }
    vision = requirements(ROOT / "payload/requirements/torchvision-cpu.txt")
    assert [name.endswith("+cpu") for name in vision] == [True]


def test_no_other_lock_brings_torch_or_cuda():
    """A dependency that pulls in PyPI's torch would bring 3 GB of CUDA by accident."""
    for lock in LOCKS:
        if "cuda" in lock.name or lock.name.startswith("torch"):
            continue
        names = {name.split("==")[0] for name in requirements(lock)}
        assert not {n for n in names if re.match(r"(torch|triton|nvidia-)", n)}, lock.name


def test_what_the_inputs_ask_for_is_locked():
    """`make lock` was run after the last change of *.in."""
    for asked in (ROOT / "payload/requirements").glob("*.in"):
        lines = re.sub(r"#.*", "", asked.read_text()).split("\n")
        wanted = {
            re.split(r"[\s=<>~!;\[]", line.strip())[0].lower() for line in lines if line.strip()
        }
        locked = {name.split("==")[0] for name in requirements(asked.with_suffix(".txt"))}
        assert {name for name in wanted if not name.startswith("-")} <= locked, asked.name


# ---- the image that was built --------------------------------------------------------------


def inspect(*options):
    done = subprocess.run(
        ["apptainer", "inspect", *options, str(IMAGE)], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.image
def test_the_images_labels():
    """Written by %labels and %post: what it is, from which state of the tree, what is in it."""
    labels = json.loads(inspect("--json", "--labels"))["data"]["attributes"]["labels"]
    assert labels["org.opencontainers.image.title"] == "Pytorch_DL_HPC"
    assert labels["org.opencontainers.image.licenses"] == "BSD-3-Clause"
    assert re.fullmatch(r"\d+\.\d+\.\d+", labels["org.opencontainers.image.version"])
    assert re.fullmatch(
        r"([\da-f]{12}|.*-g[\da-f]+)(-dirty)?|unknown", labels["org.opencontainers.image.revision"]
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+Z", labels["org.opencontainers.image.created"])
    assert re.fullmatch(r"[\da-f]{16}", labels["content-key"])
    assert labels["flavour"] == "cpu"
    assert labels["version.torch"] == "2.13.0+cpu"
    expected = "debian hpcdist jupyterlab mpi4py numpy openmpi pytest python python-hostlist rich"
    for name in [*expected.split(), "torch", "torchvision"]:
        assert re.match(r"\d|none$", labels[f"version.{name}"]), name


@pytest.mark.image
def test_the_image_says_nothing_of_the_machine_that_built_it():
    """No path of the build host in labels, definition, help and environment."""
    said = inspect("--all")
    assert str(ROOT) not in said
    assert "pytorch-dl-hpc-" not in said


@pytest.mark.image
def test_the_images_help():
    """Filled in: no argument is left as {{ NAME }}."""
    text = inspect("--helpfile")
    assert "Pytorch_DL_HPC, cpu flavour" in text
    assert re.search(r"torchvision: (none|\d\S*)\.", text)
    assert "{{" not in text
