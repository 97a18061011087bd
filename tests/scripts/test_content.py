"""The content key: what changes it, what does not, and what a payload may hold."""

import os
import stat
from pathlib import Path

import pytest
from hosts import make_tree
from imagebuild.content import image_key, layer_key, read_inputs, stage
from imagebuild.process import BuildError

CHOICES = {"suite": "bookworm", "base": "auto", "torchvision": "auto"}


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


def keys(tree, **choices):
    inputs = read_inputs(tree, "cpu")
    return image_key(inputs, {**CHOICES, **choices}), layer_key(inputs, {**CHOICES, **choices})


@pytest.mark.parametrize(
    ("file", "layer_changes"),
    [
        ("payload/hello.py", False),
        ("payload/new.py", False),
        ("payload/pyproject.toml", False),
        ("payload/requirements/cpu.in", False),
        ("payload/requirements/cpu.txt", True),
        ("payload/requirements/build.txt", True),
        ("payload/requirements/torch-cpu.txt", True),
        ("payload/requirements/torchvision-cpu.txt", True),
        ("Singularity.def", True),
    ],
)
def test_a_changed_input_changes_the_key(tree, file, layer_changes):
    """Every input changes the image's key; only what torch depends on changes the layer's."""
    image, layer = keys(tree)
    with (tree / file).open("a") as opened:
        opened.write("# more\n")
    assert keys(tree)[0] != image
    assert (keys(tree)[1] != layer) == layer_changes


@pytest.mark.parametrize(
    "choice", [{"suite": "trixie"}, {"base": "docker"}, {"torchvision": "none"}]
)
def test_a_choice_changes_both_keys(tree, choice):
    assert keys(tree)[0] != keys(tree, **choice)[0]
    assert keys(tree)[1] != keys(tree, **choice)[1]


def test_two_flavours_have_different_keys(tree):
    """Even where their locks are the same text."""
    locks = tree / "payload/requirements"
    for name in ("", "torch-", "torchvision-"):
        (locks / f"{name}cuda.txt").write_bytes((locks / f"{name}cpu.txt").read_bytes())
    cpu, cuda = read_inputs(tree, "cpu"), read_inputs(tree, "cuda")
    assert layer_key(cpu, CHOICES) != layer_key(cuda, CHOICES)
    assert image_key(cpu, CHOICES) != image_key(cuda, CHOICES)


def test_a_rename_and_a_move_of_bytes_between_files_change_the_key(tree):
    """The key holds names and lengths, not only the files' bytes one after the other."""
    (tree / "payload/a").write_text("onepayload/btwo")
    first = keys(tree)[0]
    (tree / "payload/a").write_text("one")
    (tree / "payload/b").write_text("two")
    second = keys(tree)[0]
    (tree / "payload/b").rename(tree / "payload/c")
    assert len({first, second, keys(tree)[0]}) == 3


@pytest.mark.parametrize(
    "file",
    [
        "payload/__pycache__/hello.cpython-311.pyc",
        "payload/hello.pyc",
        "payload/p.egg-info/PKG-INFO",
        "payload/build/lib/hello.py",
        "payload/.hello.py.swp",
        "README.md",
        "tests/test_x.py",
        "build/Pytorch_DL_HPC-cpu.sif",
    ],
)
def test_what_python_editors_and_builds_leave_changes_nothing(tree, file):
    before = keys(tree)
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text("x")
    assert keys(tree) == before


def test_times_and_place_change_nothing(tree, tmp_path):
    """A fresh clone elsewhere has the same key."""
    before = keys(tree)
    os.utime(tree / "payload/hello.py", (1, 1))
    assert keys(tree) == before
    assert keys(tree.rename(tmp_path / "elsewhere")) == before


def test_names_of_any_kind_are_read_and_staged(tree, tmp_path):
    """Spaces, quotes, line ends and bytes that are no UTF-8."""
    names = {"a b.py", 'it\'s "$(x)"', "line\nend", "grün", os.fsdecode(b"\xff\xfe")}
    for name in names:
        (tree / "payload" / name).touch()
    keys(tree)
    stage(read_inputs(tree, "cpu"), tmp_path / "stage")
    assert names <= {path.name for path in (tmp_path / "stage/payload").iterdir()}


def test_a_link_to_a_file_is_its_content(tree, tmp_path):
    """The image holds the content, so that is what the key is made of."""
    (tmp_path / "target").write_text("one")
    (tree / "payload/link").symlink_to(tmp_path / "target")
    before = keys(tree)
    (tmp_path / "target").write_text("two")
    assert keys(tree)[0] != before[0]
    stage(read_inputs(tree, "cpu"), tmp_path / "stage")
    staged = tmp_path / "stage/payload/link"
    assert staged.read_text() == "two"
    assert not staged.is_symlink()


@pytest.mark.parametrize("kind", ["broken link", "link to a directory", "fifo"])
def test_what_the_image_could_not_hold_is_refused_by_name(tree, tmp_path, kind):
    """Not left out in silence, and not waited for."""
    odd = tree / "payload/odd"
    if kind == "fifo":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path if kind == "link to a directory" else tmp_path / "nowhere")
    with pytest.raises(BuildError, match="payload/odd: wanted a regular file"):
        read_inputs(tree, "cpu")


@pytest.mark.parametrize("what", ["file", "directory"])
def test_an_unreadable_input_is_an_error_that_names_it(tree, monkeypatch, what):
    """os.walk leaves unreadable directories out in silence. (Root reads all: so it is faked.)"""
    (tree / "payload/closed").mkdir()
    (tree / "payload/closed/file").touch()
    scandir, read_bytes = os.scandir, Path.read_bytes

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    def closed(path):
        return refuse(path) if str(path).endswith("closed") else scandir(path)

    def closed_file(path):
        return refuse(path) if path.parent.name == "closed" else read_bytes(path)

    if what == "directory":
        monkeypatch.setattr(os, "scandir", closed)
    else:
        monkeypatch.setattr(Path, "read_bytes", closed_file)
    with pytest.raises(PermissionError, match="payload/closed"):
        read_inputs(tree, "cpu")


def test_staged_files_are_what_was_read_and_readable_by_all(tree, tmp_path):
    """An edit after reading does not get in, and umask 077 does not make an image for root only."""
    (tree / "payload/hello.py").chmod(0o600)
    inputs = read_inputs(tree, "cpu")
    (tree / "payload/hello.py").write_text("edited")
    before = os.umask(0o077)
    try:
        stage(inputs, tmp_path / "stage")
    finally:
        os.umask(before)
    payload = tmp_path / "stage/payload"
    assert (payload / "hello.py").read_text() == "print('hello')\n"
    assert stat.S_IMODE((payload / "hello.py").stat().st_mode) == 0o644
    assert stat.S_IMODE(payload.stat().st_mode) == 0o755
    assert stat.S_IMODE((payload / "requirements").stat().st_mode) == 0o755


def test_an_unknown_flavour_is_answered_with_the_known_ones(tree):
    with pytest.raises(BuildError, match="^FLAVOUR=gpu is unknown; wanted one of: cpu$"):
        read_inputs(tree, "gpu")


def test_half_a_flavour_is_none(tree):
    """A torch lock without the lock of the rest defines no flavour."""
    (tree / "payload/requirements/torch-cuda.txt").touch()
    with pytest.raises(BuildError, match="FLAVOUR=cuda is unknown"):
        read_inputs(tree, "cuda")


@pytest.mark.parametrize("text", ["[project]\n", None])
def test_a_payload_without_a_version_is_refused(tree, text):
    project = tree / "payload/pyproject.toml"
    if text is None:
        project.unlink()
    else:
        project.write_text(text)
    with pytest.raises(BuildError, match="no line `version"):
        read_inputs(tree, "cpu")
