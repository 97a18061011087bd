"""`make pull` with a fake apptainer: a good image arrives, a bad one never harms what is there."""

import hashlib
import os
import signal

import pytest
from hosts import read_only
from sif_files import labels_of, write_sif

OLD = {"flavour": "old"}
NEW = {"flavour": "cpu", "version.torch": "2.13.0+cpu"}
WANTED = "wanted a file, oras://, docker:// or https://"


@pytest.fixture
def source(tmp_path):
    write_sif(tmp_path / "new image.sif", NEW)
    return tmp_path / "new image.sif"


@pytest.fixture
def target(host):
    """The image that is there already."""
    host.output.parent.mkdir()
    write_sif(host.output, OLD)
    return host.output


def pull(host, uri, *options, **more):
    return host.run("registry.py", "pull", uri, "--out", host.output, *options, **more)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_refused(host, done, *parts, code=1):
    """One line with these parts; the old image byte for byte, and nothing beside it."""
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("pull: ")
    for part in parts:
        assert part in line
    assert_untouched(host)


def assert_untouched(host):
    write_sif(host.path / "expected", OLD)
    assert host.output.read_bytes() == (host.path / "expected").read_bytes()
    assert host.leftovers() == []
    names = {path.name for path in host.output.parent.iterdir()}
    assert names <= {host.output.name, f".{host.output.name}.lock"}


# ---- what arrives --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{0}", "file://{0}", "relative"])
@pytest.mark.parametrize("checksum", [None, "lower", "UPPER"])
def test_a_file(host, source, form, checksum):
    """By path or URL, with its checksum in either case or without; the source stays."""
    uri = os.path.relpath(source, host.tree) if form == "relative" else form.format(source)
    digest = sha256(source)
    given = {None: [], "lower": ["--sha256", digest], "UPPER": ["--sha256", digest.upper()]}
    done = pull(host, uri, *given[checksum])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"sha256 {digest}", "flavour cpu, version.torch 2.13.0+cpu", f"pulled {host.output}",
    ]  # fmt: skip
    assert host.output.read_bytes() == source.read_bytes()
    assert host.leftovers() == []


def test_a_new_image_takes_the_place_of_the_old_one(host, source, target):
    assert pull(host, source).returncode == 0
    assert labels_of(target) == NEW


def test_an_image_may_be_pulled_onto_itself(host, target):
    assert pull(host, target).returncode == 0
    assert_untouched(host)


@pytest.mark.parametrize(
    ("uri", "plain"),
    [
        ("oras://registry.site/name:tag", False),
        ("docker://python:3.11", False),
        ("https://site/x.sif", False),
        ("oras://localhost.site/name:tag", False),
        ("oras://127.site/name:tag", False),
        ("oras://localhost:5000/name:tag", True),
        ("oras://127.0.0.1:5000/name:tag", True),
        ("oras://[::1]:5000/name:tag", True),
    ],
)
def test_a_registry(host, uri, plain):
    """By the runtime, to a temporary name; plain HTTP with this very host only."""
    done = pull(host, uri)
    assert (done.returncode, done.stderr) == (0, "")
    assert labels_of(host.output)["flavour"] == "cpu"
    (call,) = host.calls("pull")
    assert call[-1] == uri
    assert call[-2] != str(host.output)
    assert ("--no-https" in call) == plain
    assert host.leftovers() == []


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("", ["IMAGE_URI is empty", WANTED]),
        ("shub://owner/name", ["shub://owner/name: Singularity Hub closed in 2021", WANTED]),
        ("library://name", ["library://name: Apptainer has no default library remote", WANTED]),
        ("ftp://site/x.sif", ["ftp://site/x.sif: unknown scheme ftp", WANTED]),
        ("http://site/x.sif", ["http://site/x.sif: unknown scheme http", WANTED]),
        ("missing.sif", ["IMAGE_URI=missing.sif: no such file"]),
        ("file:///missing.sif", ["IMAGE_URI=/missing.sif: no such file"]),
        ("/", ["IMAGE_URI=/: no such file"]),
    ],
)
def test_a_source_that_is_none(host, target, uri, parts):
    assert_refused(host, pull(host, uri), *parts)
    assert host.calls("pull") == []


@pytest.mark.parametrize("uri", ["file", "oras://site/name:tag"])
def test_a_wrong_checksum(host, source, target, uri):
    wrong = "0" * 64
    done = pull(host, source if uri == "file" else uri, "--sha256", wrong)
    assert_refused(host, done, ": sha256 is ", f", wanted {wrong}")


def test_a_checksum_that_is_none_is_told_before_anything_is_fetched(host, target):
    done = pull(host, "oras://site/name:tag", "--sha256", "abc")
    assert_refused(host, done, "SHA256=abc: wanted 64 hexadecimal digits")
    assert host.calls("pull") == []


@pytest.mark.parametrize("damage", ["half", "a byte less", "empty", "page"])
def test_a_file_that_is_no_whole_image(host, source, target, damage):
    whole = source.read_bytes()
    content = {
        "half": whole[: len(whole) // 2],
        "a byte less": whole[:-1],
        "empty": b"",
        "page": b"<",
    }
    source.write_bytes(content[damage])
    assert_refused(host, pull(host, source), "not a whole image", "fetch it again")


def test_a_web_page_instead_of_an_image(host, target):
    """As a portal answers that wants a login; the runtime is content with it."""
    done = pull(host, "https://site/x.sif", FAKE_APPTAINER="page")
    assert_refused(host, done, "https://site/x.sif: not a whole image")


def test_a_dead_registry(host, target):
    done = pull(host, "oras://site/name:tag", FAKE_APPTAINER="no-network")
    assert_refused(host, done, "oras://site/name:tag: no network (FATAL: While pulling image: dial")


@pytest.mark.parametrize("uri", ["file", "oras://site/name:tag"])
def test_a_full_disk(host, target, uri):
    """Of the image's directory. What was there before is seen through the same mount."""
    big = host.path / "big"
    big.write_bytes(b"\0" * (1 << 20))
    small = host.path / "small"
    small.mkdir()
    fill = f'mount -t tmpfs -o size=64k none "{small}" && cp "{target}" "{small}/x"'
    after = f'"$@"; code=$?; cmp "{target}" "{small}/x" >&2; ls -A "{small}"'
    wrapper = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-m", "sh", "-c"]
    done = host.run(
        "registry.py", "pull", big if uri == "file" else uri, "--out", small / "x",
        wrapper=[*wrapper, f"{fill} && {{ {after}; exit $code; }}", "sh"], FAKE_APPTAINER="full",
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "the disk is full" in line
    assert done.stdout.split() == [".x.lock", "x"]


def test_a_read_only_target(host, source, target):
    done = pull(host, source, wrapper=read_only(host.tree))
    assert_refused(host, done, "Read-only file system")


def test_a_directory_as_target(host, source):
    """Told before the download."""
    host.output.mkdir(parents=True)
    done = pull(host, source)
    assert done.returncode == 1
    assert done.stderr.startswith(f"pull: error: OUT={host.output} is a directory, wanted a file: ")
    assert [path.name for path in host.output.parent.iterdir()] == [host.output.name]


def test_no_runtime(host, source, target):
    """Without it a file cannot be checked either."""
    done = pull(host, source, PATH="/nonexistent")
    assert_refused(host, done, "no apptainer or singularity in PATH: run `make setup`")


def test_misuse_is_one_line(host):
    done = host.run("registry.py", "pull")
    assert done.returncode == 2
    assert done.stderr == (
        "registry.py: error: the following arguments are required: uri (--help lists all)\n"
    )


# ---- interrupted ---------------------------------------------------------------------------


def start_slow(host):
    """A pull in the middle of its download."""
    child = host.start(
        "registry.py", "pull", "oras://site/n:t", "--out", host.output, FAKE_APPTAINER="slow"
    )
    while not list(host.output.parent.glob(".*.pull")):
        assert child.poll() is None
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_pull_leaves_nothing(host, target, number):
    child = start_slow(host)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "pull: stopped; nothing was changed\n")
    assert host.survivors() == []
    assert_untouched(host)


def test_a_killed_pull_is_cleared_away_by_the_next_one(host, source, target):
    """kill -9: the download ends too; its parts lie there until the next pull."""
    child = start_slow(host)
    child.kill()
    child.communicate(timeout=60)
    assert host.survivors() == []
    assert labels_of(target) == OLD
    assert pull(host, "oras://site/n:t").returncode == 0
    assert host.leftovers() == []
    assert labels_of(target)["flavour"] == "cpu"


def test_of_two_pulls_the_second_is_refused(host, source, target):
    """A build of the same image counts as well: they share the lock."""
    gate = host.path / "gate"
    first = host.start(
        "registry.py", "pull", "oras://site/n:t", "--out", target,
        FAKE_APPTAINER="gate", FAKE_GATE=gate,
    )  # fmt: skip
    while not host.calls("pull"):
        assert first.poll() is None
    for second in (pull(host, source), host.build()):
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert f"is running (process {first.pid} on " in line
    assert labels_of(target) == OLD
    gate.touch()
    assert first.communicate(timeout=60)[1] == ""
    assert first.returncode == 0
    assert labels_of(target)["flavour"] == "cpu"
