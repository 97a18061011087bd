"""The build's flow with a fake apptainer: what is built when, from where, with which settings."""

import json
import os
import pwd
import re
import stat
from pathlib import Path

import pytest
from hosts import tiny_definition
from imagebuild.build import cache_directory
from imagebuild.process import BuildError
from sif_files import labels_of


def test_a_build_makes_the_layer_then_the_image(host):
    done = host.build()
    assert (done.returncode, done.stderr) == (0, "")
    assert host.built_layers() == ["deps", "payload"]
    key = host.run("image.py", "key").stdout.strip()
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert labels_of(host.output)["content-key"] == key
    (layer,) = host.layers.glob("*.sif")
    assert layer.name == f"deps-{labels_of(layer)['content-key']}.sif"
    assert labels_of(layer)["content-key"] != key
    assert host.leftovers() == []
    out = done.stdout.splitlines()
    assert out[0] == (f"building Pytorch_DL_HPC-cpu.sif, content key {key}; log: {host.output}.log")
    assert f"built {host.output}: 0 MB in" in out[-1]
    assert any(line.endswith("] payload installs things") for line in out)


def test_what_is_up_to_date_is_not_built_again(built):
    done = built.build()
    assert re.fullmatch(rf"{built.output}: up to date \(content key \w+\)\n", done.stdout)
    assert built.built_layers() == []


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ("payload/hello.py", ["payload"]),
        ("payload/requirements/cpu.txt", ["deps", "payload"]),
        ("Singularity.def", ["deps", "payload"]),
    ],
)
def test_a_change_builds_what_depends_on_it(built, change, again):
    """A change of the payload installs no torch."""
    built.edit(change)
    assert built.build().returncode == 0
    assert built.built_layers() == again


def test_refresh_builds_everything_again(built):
    """Without the cached base: mmdebstrap is asked for a new one, as no registry answers here."""
    host = built
    host.program("mmdebstrap", 'echo new > x; tar -cf "${@: -1}" x')
    done = host.build("--refresh", https_proxy="http://127.0.0.1:1")
    assert done.returncode == 0
    assert host.built_layers() == ["deps", "payload"]
    assert host.tarball.read_bytes() != b"base"


def test_another_name_and_place(host, tmp_path):
    """OUT=: spaces are fine, and a log of the same stem that is there is the user's own."""
    (tmp_path / "my images").mkdir()
    (tmp_path / "my images/x.log").write_text("precious")
    done = host.build("--out", tmp_path / "my images/x.sif")
    assert done.returncode == 0
    names = sorted(path.name for path in (tmp_path / "my images").iterdir())
    assert names == [".x.sif.lock", "x.log", "x.sif", "x.sif.log"]
    assert (tmp_path / "my images/x.log").read_text() == "precious"
    assert not host.output.parent.exists()


def test_the_newest_layers_are_kept(host):
    """Three; older ones would fill the disk."""
    directory = host.layers
    seen = []
    for _ in range(4):
        host.edit("payload/requirements/cpu.txt")
        assert host.build().returncode == 0
        seen += [path for path in directory.glob("*.sif") if path not in seen]
    assert sorted(directory.glob("*.sif")) == sorted(seen[1:])


def test_the_runtimes_arguments(host):
    """Checked by %test, compressed by zstd; no path of this host in what the image records."""
    host.build()
    deps, payload = host.calls("build")
    assert ("--notest" in deps, "--notest" in payload) == (True, False)
    for call in (deps, payload):
        assert call[:3] == ["build", "--fakeroot", "--force"]
        assert call[call.index("--mksquashfs-args") + 1].startswith("-comp zstd")
        source = next(word for word in call if word.startswith("FROM="))
        assert re.fullmatch(r"FROM=base\.(tar|sif)", source)
    assert "VERSION=1.2.3" in payload
    assert "REVISION=unknown" in payload


def test_the_revision_is_gits(host):
    host.program("git", 'echo "v1-dirty"')
    host.build()
    assert "REVISION=v1-dirty" in host.calls("build")[1]


def test_every_argument_of_the_definition_is_passed_and_no_other(host):
    """An unknown one would end the build, one that is forgotten would stay at its default."""
    host.build()
    known = re.search(r"^%arguments\n(.*?)^%", tiny_definition(), re.M | re.S).group(1)
    for call in host.calls("build"):
        pairs = [call[at + 1] for at, word in enumerate(call) if word == "--build-arg"]
        passed = {pair.split("=")[0] for pair in pairs}
        assert passed <= set(re.findall(r"^\s+([A-Z_]+)=", known, re.M))
    assert passed == set(re.findall(r"^\s+([A-Z_]+)=", known, re.M))


@pytest.mark.parametrize(
    ("wanted", "got"), [("none", "none"), ("0.28.0+cpu", "0.28.0+cpu"), ("auto", "none")]
)
def test_torchvision(host, wanted, got):
    """`auto` is none here, where no index answers; the payload's layer gets what deps has."""
    assert host.build("--torchvision", wanted).returncode == 0
    assert all(f"TORCHVISION={got}" in call for call in host.calls("build"))


def test_settings_reach_the_build_by_a_private_file_only(host):
    """Not by arguments, which are public, and not by the log."""
    wheels = host.path / "wheels"
    wheels.mkdir()
    done = host.build(http_proxy="http://u:secret@proxy:1", PIP_FIND_LINKS=wheels)
    assert done.returncode == 0
    lines = [json.loads(line) for line in host.log.read_text().splitlines()]
    (settings, _) = [line["host.env"] for line in lines if isinstance(line, dict)]
    assert "export http_proxy=http://u:secret@proxy:1\n" in settings
    assert "export FIND_LINKS=/mnt/local0\n" in settings
    deps = host.calls("build")[0]
    assert f"{wheels}:/mnt/local0" in deps
    assert "secret" not in json.dumps(deps)
    assert "secret" not in host.build_log()


# ---- odd environments ----------------------------------------------------------------------


def test_a_relative_cache_and_no_home(host):
    """A relative path counts from where the build is started."""
    host.cache.rename(host.tree / "relative cache")
    done = host.build(XDG_CACHE_HOME="relative cache", HOME=None)
    assert done.returncode == 0
    made = host.tree / "relative cache/pytorch-dl-hpc/layers"
    assert len(list(made.glob("*.sif"))) == 1


def test_where_the_cache_is(monkeypatch, tmp_path):
    """XDG_CACHE_HOME, else HOME, else the account's home; without an account it must be named."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/pytorch-dl-hpc")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == tmp_path / ".cache/pytorch-dl-hpc"
    monkeypatch.delenv("HOME")
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert cache_directory() == Path(home, ".cache/pytorch-dl-hpc")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(BuildError, match="^no home directory: XDG_CACHE_HOME=/big/directory make"):
        cache_directory()


def test_spaces_everywhere(host):
    spaced = host.path / "a b" / "c d"
    spaced.mkdir(parents=True)
    for name in ("tmp", "cache"):
        (spaced / name).mkdir()
    tree = host.tree.rename(spaced / "the tree")
    host.tree, host.output = tree, tree / "build" / host.output.name
    done = host.build(TMPDIR=spaced / "new tmp", XDG_CACHE_HOME=host.cache.rename(spaced / "c c"))
    assert (done.returncode, done.stderr) == (0, "")
    assert labels_of(host.output)["content-key"]
    assert list((spaced / "new tmp").iterdir()) == []


def test_the_workspace_is_for_its_owner_only(host):
    """A password may be in it."""
    build = host.start_slow_build()
    (workspace,) = host.leftovers()
    assert stat.S_IMODE((host.temporary / workspace).stat().st_mode) == 0o700
    build.terminate()
    build.communicate(timeout=60)


def test_clean_cache_removes_the_cache_and_nothing_else(built):
    host = built
    (host.cache / "other").touch()
    assert host.run("image.py", "clean-cache").returncode == 0
    assert [path.name for path in host.cache.iterdir()] == ["other"]
    assert host.output.exists()
    assert host.run("image.py", "clean-cache").returncode == 0, "also when there is none"
