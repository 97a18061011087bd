"""A SIF is whole or it is no image; and a finished one is moved into place at one stroke."""

import shutil
import subprocess

import pytest
from imagebuild.process import BuildError
from imagebuild.sif import check_target, is_whole, publish, read_labels
from sif_files import write_sif


@pytest.fixture
def image(tmp_path):
    write_sif(tmp_path / "x.sif", {"content-key": "abc"})
    return tmp_path / "x.sif"


def cut(image, size):
    with image.open("r+b") as file:
        file.truncate(size)


def test_a_whole_image(image):
    assert is_whole(image)


@pytest.mark.parametrize("missing", [1, 4096, 8192, 12000, 20000])
def test_a_truncated_image_is_not_whole(image, missing):
    """Cut by a byte, in the file system, in the labels, in the descriptors."""
    cut(image, image.stat().st_size - missing)
    assert not is_whole(image)


@pytest.mark.parametrize("content", [b"", b"x" * 127, b"<html>" * 9999, b"\0" * 99999])
def test_other_files_are_no_image(tmp_path, content):
    (tmp_path / "x.sif").write_bytes(content)
    assert not is_whole(tmp_path / "x.sif")


@pytest.mark.parametrize("place", [88, 96], ids=["number", "offset"])
@pytest.mark.parametrize("value", [2**62, -1, 0])
def test_a_header_of_nonsense_is_no_image(image, place, value):
    """Descriptors that no file can have are neither believed nor read into memory."""
    content = bytearray(image.read_bytes())
    content[place : place + 8] = value.to_bytes(8, "little", signed=True)
    image.write_bytes(content)
    assert not is_whole(image)


def test_labels_of_a_whole_image_only(image, host, monkeypatch):
    """The runtime itself reads the labels of a cut image (the fake does as the real one)."""
    for name, value in host.env.items():
        monkeypatch.setenv(name, value)
    assert read_labels(image) == {"content-key": "abc"}
    cut(image, image.stat().st_size - 1)
    shown = subprocess.run(["apptainer", "inspect", str(image)], capture_output=True, text=True)
    assert "abc" in shown.stdout
    assert read_labels(image) == {}
    assert read_labels(image.parent) == read_labels(image / "none") == {}


@pytest.mark.image
def test_the_real_runtime_reads_labels_of_a_cut_image(real_built):
    """Why is_whole exists: `apptainer inspect` is content with half of an image."""
    half = real_built.output
    assert is_whole(half)
    assert read_labels(half)["flavour"] == "cpu"
    cut(half, half.stat().st_size // 2)
    shown = subprocess.run(["apptainer", "inspect", str(half)], capture_output=True, text=True)
    assert "flavour: cpu" in shown.stdout
    assert not is_whole(half)
    assert read_labels(half) == {}


def test_publish_replaces_at_one_stroke_and_leaves_no_part(tmp_path):
    (tmp_path / "new").write_text("new")
    (tmp_path / "target").write_text("old")
    inode = (tmp_path / "new").stat().st_ino
    publish(tmp_path / "new", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "new"
    assert (tmp_path / "target").stat().st_ino == inode, "renamed, not written anew"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_publish_overwrites_the_part_of_a_killed_one(tmp_path):
    (tmp_path / ".target.part").write_text("half")
    (tmp_path / "new").write_text("new")
    publish(tmp_path / "new", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target").read_text() == "new"


def test_a_publish_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    """As on a full disk: half a copy is written, then there is no more."""

    def half_a_move(source, target):
        (tmp_path / ".target.part").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "move", half_a_move)
    (tmp_path / "target").write_text("old")
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path / "new", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target").read_text() == "old"


def test_a_directory_is_no_target(tmp_path):
    with pytest.raises(
        BuildError, match=f"is a directory, wanted a file: OUT={tmp_path}/image.sif"
    ):
        check_target(tmp_path)
    check_target(tmp_path / "x.sif")
