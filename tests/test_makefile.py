"""The Makefile: every verb runs in theory, help is complete, and values stay values."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Makefile").read_text()
DOCUMENTED = dict(re.findall(r"^([a-z-]+):[^#\n]*## (.+)$", TEXT, re.M))
# A shell and make itself would each find something to do in these.
NASTY = [
    "a b",
    "it's",
    '"double"',
    "`touch owned`",
    "$(touch owned)",
    "$(shell touch owned)",
    "$HOME",
    "$$",
    "a;touch owned",
    "a#b",
    "*",
    "--flag",
    "back\\slash",
]


def make(*words, cwd=ROOT, **env):
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=str(cwd),
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def tree(tmp_path):
    """A tree with this Makefile whose Python prints its arguments and touches nothing."""
    (tmp_path / "Makefile").write_text(TEXT)
    (tmp_path / "scripts").mkdir()
    setup = tmp_path / "scripts/setup-apptainer.sh"
    setup.write_text("#!/bin/sh\n")
    setup.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable} -IS\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    python.chmod(0o755)
    return tmp_path


def arguments(tree, target, how, **values):
    """What the target's script gets where these values are set on the command line or around it."""
    words = [f"{name}={value}" for name, value in values.items()] if how == "command line" else []
    around = values if how == "environment" else {}
    done = make("-s", target, f"PYTHON={tree}/python", *words, cwd=tree, **around)
    assert done.returncode == 0, done.stderr
    assert not (tree / "owned").exists()
    return json.loads(done.stdout)


def value_of(option, words):
    """An option's value, as one word or two."""
    for at, word in enumerate(words):
        if word == option:
            return words[at + 1]
        if word.startswith(f"{option}="):
            return word[len(option) + 1 :]
    return None


# ---- help ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", sorted(DOCUMENTED))
def test_every_target_of_help_runs_in_theory(target):
    """`make -n`: its recipe and its prerequisites' can be expanded."""
    done = make("-n", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != ""
    assert done.stderr == ""


def test_make_alone_prints_help_with_every_target():
    """Name and text of each, also in the C locale; nothing is run."""
    done = make()
    assert done.returncode == 0, done.stderr
    assert done.stdout == make("help").stdout
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines() if line[:2] == "  "]
    assert [word for word, _, _ in lines] == ["make"] * len(lines)
    assert {name: text for _, name, text in lines} == DOCUMENTED


def test_every_target_is_documented_and_phony():
    """A file called `test-unit` must not switch the target off."""
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", TEXT, re.M))
    phony = set(re.search(r"^\.PHONY:(.*)$", TEXT, re.M).group(1).split())
    assert targets == set(DOCUMENTED) == phony


def test_help_names_the_variables_that_its_target_takes():
    """What the recipes of build, pull and launch read is in their help, and the other way round."""
    for target in ("image", "pull", "launch"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", TEXT, re.M).group(1)
        read = set(re.findall(r"\$\(([A-Z_\d]+)\)|(?<=,)([A-Z_\d]+)(?=\))", recipe))
        read = {name for pair in read for name in pair if name} - {"PYTHON", "IMAGE"}
        shown = set(re.findall(r"\b([A-Z][A-Z\d_]+|V)=", DOCUMENTED[target])) - {"V"}
        assert read == shown, target


# ---- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["command line", "environment"])
@pytest.mark.parametrize("value", NASTY)
def test_a_value_reaches_launch_as_one_word(tree, value, how):
    """Neither make nor a shell evaluates what is in it."""
    words = arguments(tree, "launch", how, SCRIPT=value, ARGS=value, TIME=value, JOB=value)
    assert [value_of(f"--{name}", words) for name in ("script", "arguments", "time", "job")] == (
        [value] * 4
    )


@pytest.mark.parametrize("how", ["command line", "environment"])
@pytest.mark.parametrize("value", NASTY)
def test_a_value_reaches_pull_as_one_word(tree, value, how):
    words = arguments(tree, "pull", how, IMAGE_URI=value, OUT=value, SHA256=value)
    assert value in words[:3]
    assert (value_of("--out", words), value_of("--sha256", words)) == (value, value)


@pytest.mark.parametrize("value", NASTY)
def test_a_value_reaches_image_as_one_word(tree, value):
    words = arguments(tree, "image", "command line", FLAVOUR=value, SUITE=value, OUT=value)
    assert [value_of(f"--{n}", words) for n in ("flavour", "suite", "out")] == [value] * 3


def test_the_defaults(tree):
    """What is not set is left to the script, but for the image's name."""
    image = f"{tree}/build/Pytorch_DL_HPC-cpu.sif"
    assert arguments(tree, "image", "command line") == [
        "scripts/image.py", "build", "--flavour", "cpu",
    ]  # fmt: skip
    launch = arguments(tree, "launch", "command line", SCRIPT="x.py")
    assert launch[:2] == ["scripts/launch.py", "--job"]
    assert (value_of("--job", launch), value_of("--image", launch)) == ("nccl", image)
    assert not {"--dry-run", "--site", "--nodes", "--gpus", "--tasks", "--time"} & set(launch)
    assert value_of("--out", arguments(tree, "pull", "command line", IMAGE_URI="x")) == image


def test_the_flavour_names_the_image(tree):
    words = arguments(tree, "launch", "command line", SCRIPT="x.py", FLAVOUR="cuda")
    assert value_of("--image", words) == f"{tree}/build/Pytorch_DL_HPC-cuda.sif"


@pytest.mark.parametrize(
    ("variable", "option"),
    [("NODES", "--nodes=2"), ("GPUS", "--gpus=2"), ("TASKS", "--tasks=2"), ("SITE", "--site=2")],
)
def test_options_of_launch(tree, variable, option):
    assert option in arguments(tree, "launch", "command line", SCRIPT="x.py", **{variable: "2"})


def test_switches(tree):
    launch = arguments(tree, "launch", "command line", SCRIPT="x.py", DRY_RUN="1")
    assert "--dry-run" in launch
    assert "--refresh" in arguments(tree, "image", "command line", REFRESH="1")


# ---- bad input -----------------------------------------------------------------------------


def last_words(done):
    """The scripts' lines; make adds one of its own."""
    return [line for line in done.stderr.splitlines() if not line.startswith("make: ")]


def test_an_unknown_flavour():
    done = make("-o", "setup", "image", "FLAVOUR=gpu", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    (line,) = last_words(done)
    assert line.startswith("image: error: FLAVOUR=gpu is unknown; wanted one of: ")


def test_pull_without_a_source():
    done = make("-o", "setup", "pull", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert last_words(done) == [
        "pull: error: IMAGE_URI is empty; wanted a file, oras://, docker:// or https://"
    ]


def test_launch_without_a_script(tmp_path):
    (tmp_path / "x.sif").touch()
    done = make("launch", f"IMAGE={tmp_path}/x.sif", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert last_words(done) == [
        "launch: error: no SCRIPT: make launch SCRIPT=FILE, the Python program of the job"
    ]
