"""Each check before a build, where it passes and where it fails."""

import os
import pwd
import shutil
from collections import namedtuple

import pytest
from imagebuild import preflight

GIB = 1024**3
Usage = namedtuple("Usage", "total used free")
MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/home {home} nfs4 rw,vers=4.2 0 0
tmpfs {home}/local tmpfs rw,nosuid 0 0
/dev/sdb1 {home}/quick\\040scratch xfs rw,noexec,nosuid 0 0
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """A home on NFS with a local directory and a noexec one mounted below it."""
    table = tmp_path / "mounts"
    table.write_text(MOUNTS.format(home=tmp_path / "home"))
    for name in ("local", "quick scratch"):
        (tmp_path / "home" / name).mkdir(parents=True)
    mount_of = preflight.mount_of
    monkeypatch.setattr(preflight, "mount_of", lambda directory: mount_of(directory, table))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(99 * GIB, 0, 99 * GIB))
    return tmp_path / "home"


def test_a_good_host_has_no_problems(host, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(99 * GIB, 0, 99 * GIB))
    monkeypatch.setattr(preflight, "subuid_problems", list)
    monkeypatch.setenv("PATH", host.env["PATH"])
    assert preflight.problems(host.temporary, host.cache, host.tree, {}) == []


def test_every_problem_is_a_line_of_its_own(tmp_path, monkeypatch):
    """All are told at once, so that none is found only after another was repaired."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GIB, GIB, 0))
    monkeypatch.setattr(preflight, "subuid_problems", lambda: ["no range"])
    monkeypatch.setattr(preflight, "namespace_problems", lambda: ["no namespaces"])
    monkeypatch.setenv("PATH", str(tmp_path))
    found = preflight.problems(tmp_path, tmp_path, tmp_path, {"http_proxy": "proxy:3128"})
    assert [line.split()[0] for line in found] == [
        "no", "temporary", "cache", "output", "http_proxy=proxy:3128", "no", "no",
    ]  # fmt: skip
    assert not any("\n" in line for line in found)
    assert found[0] == (
        "no apptainer or singularity in PATH: run `make setup` (or `module load` it)"
    )


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["apptainer", "singularity"], "apptainer"),
        (["singularity"], "singularity"),
        (["docker"], None),
    ],
)
def test_the_runtime_is_apptainer_or_else_singularity(tmp_path, monkeypatch, names, chosen):
    for name in names:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.find_runtime() == (str(tmp_path / chosen) if chosen else None)


@pytest.mark.parametrize(("role", "wanted"), [("temporary", 4), ("cache", 3), ("output", 1)])
def test_space(tmp_path, monkeypatch, role, wanted):
    """Exactly enough is enough; a byte less is refused, with what there is and what is wanted."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, wanted * GIB))
    assert preflight.directory_problems(role, tmp_path, "do this") == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, wanted * GIB - 1))
    assert preflight.directory_problems(role, tmp_path, "do this") == [
        f"{role} directory {tmp_path} has {wanted:.1f} GiB free, {wanted} GiB wanted: do this"
    ]


def test_a_directory_that_is_not_there_yet_is_judged_by_its_parent(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(0, 0, 0 if path == tmp_path else 9)
    )
    (line,) = preflight.directory_problems("cache", tmp_path / "a/b/c", "do this")
    assert line.startswith(f"cache directory {tmp_path} has 0.0 GiB free")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    """Root's permissions say yes on a read-only mount: so a file is really made."""

    def refuse(self):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    assert preflight.directory_problems("output", tmp_path, "do this") == [
        f"output directory {tmp_path} is not writable: do this"
    ]


def test_the_write_test_leaves_nothing(tmp_path):
    assert preflight.is_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_directory(tmp_path):
    (tmp_path / "file").touch()
    assert preflight.directory_problems("cache", tmp_path / "file/cache", "do this") == [
        f"cache directory {tmp_path / 'file'} is not a directory: do this"
    ]


@pytest.mark.parametrize(
    ("name", "unfit"),
    [("a:b,c", ["temporary", "cache"]), ("it's", ["temporary"]), ("a b-ü$*", [])],
)
def test_names_that_apptainer_cannot_take(mounts, name, unfit):
    """--bind splits at `:` and `,`; a shell of the build reads the temporary directory's name."""
    path = mounts / "local" / name
    for role in ("temporary", "cache", "output"):
        found = preflight.directory_problems(role, path, "do this")
        assert len(found) == (role in unfit)
        assert all(line.endswith("which Apptainer cannot take: do this") for line in found)
    if name == "a:b,c":
        assert found == []
        (line,) = preflight.directory_problems("cache", path, "do this")
        assert line.startswith(f"cache directory {path} has , : in its name")


@pytest.mark.parametrize(
    ("place", "problem"),
    [("", "is on nfs4"), ("local", None), ("quick scratch", "is mounted noexec")],
)
def test_the_temporary_directory_is_local_and_allows_programs(mounts, place, problem):
    """The innermost mount counts; the same mounts do no harm to cache and output."""
    path = mounts / place
    wanted = [f"temporary directory {path} {problem}: do this"] if problem else []
    assert preflight.directory_problems("temporary", path, "do this") == wanted
    assert preflight.directory_problems("cache", path, "do this") == []


def test_a_mount_is_not_taken_for_its_neighbour(mounts):
    """/home/local2 is not below the mount /home/local."""
    (mounts / "local2").mkdir()
    assert preflight.mount_of(mounts / "local2")["type"] == "nfs4"
    assert preflight.mount_of(mounts / "local")["type"] == "tmpfs"
    assert preflight.mount_of(mounts.parent)["type"] == "ext4"


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "all_proxy"])
def test_a_proxy_needs_a_scheme(name):
    assert preflight.proxy_problems({name: "proxy.site:3128"}) == [
        f"{name}=proxy.site:3128 has no scheme: export {name}=http://proxy.site:3128"
    ]
    assert preflight.proxy_problems({name: "http://proxy.site:3128", "no_proxy": "site"}) == []


class Account:
    pw_name, pw_uid = "ada", 1001


@pytest.mark.parametrize(
    ("subuid", "subgid", "good"),
    [
        ("ada:100000:65536", "ada:100000:65536", True),
        ("1001:100000:65536", "ada:100000:65536", True),
        ("root:1:9\nada:100000:200000", "ada:100000:65536", True),
        ("ada:100000:65536", "", False),
        ("ada:100000:65536", None, False),
        ("adam:100000:65536", "ada:100000:65536", False),
        ("ada:100000:1000", "ada:100000:65536", False),
        ("#ada:100000:65536", "ada:100000:65536", False),
        ("ada:100000", "ada:100000:65536", False),
    ],
)
def test_a_range_of_user_and_group_ids(tmp_path, monkeypatch, subuid, subgid, good):
    """By name or by number, in both files, and large enough."""
    for name, text in (("subuid", subuid), ("subgid", subgid)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: Account)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = preflight.subuid_problems(tmp_path / "subuid", tmp_path / "subgid")
    remedy = "usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 ada"
    assert len(found) == (0 if good else 1)
    assert good or f"ask root for `{remedy}`" in found[0]


def test_a_range_of_a_directory_service_counts(tmp_path, monkeypatch):
    """getsubids knows what the files do not."""
    (tmp_path / "getsubids").write_text("#!/bin/sh\necho 0: $1 100000 65536\n")
    (tmp_path / "getsubids").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert preflight.subuid_problems(tmp_path / "none", tmp_path / "none") == []
    (tmp_path / "getsubids").write_text("#!/bin/sh\necho Error fetching ranges >&2; exit 1\n")
    assert len(preflight.subuid_problems(tmp_path / "none", tmp_path / "none")) == 1


def test_a_user_without_an_account(tmp_path, monkeypatch):
    """As in a container with an arbitrary uid: the number is the name."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = preflight.subuid_problems(tmp_path / "none", tmp_path / "none")
    assert line.startswith("user 4711 has no range")


@pytest.mark.parametrize("name", ["user/max_user_namespaces", "kernel/unprivileged_userns_clone"])
def test_user_namespaces(tmp_path, monkeypatch, name):
    """Off is a problem for an ordinary user only; a kernel without the file has no such switch."""
    switch = tmp_path / name
    switch.parent.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert preflight.namespace_problems(tmp_path) == []
    switch.write_text("1\n")
    assert preflight.namespace_problems(tmp_path) == []
    switch.write_text("0\n")
    (line,) = preflight.namespace_problems(tmp_path)
    assert line.startswith(f"{name} is 0: ask root for `sysctl -w {name.replace('/', '.')}=")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert preflight.namespace_problems(tmp_path) == []
