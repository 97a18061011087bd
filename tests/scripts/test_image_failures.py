"""Bad input and failing builds: one clear line, exit code not 0, nothing broken left behind."""

import hashlib
import os
import signal

import pytest
from hosts import in_namespace, read_only, small_disk
from sif_files import labels_of, write_sif

OLD = {"content-key": "old"}


@pytest.fixture
def old_image(host):
    """An image of an earlier state of the tree, as every failure must leave it."""
    host.output.parent.mkdir()
    write_sif(host.output, OLD)
    return host.output


def assert_refused(done, *lines, code=1):
    """Nothing but these lines on stderr, each whole."""
    assert done.stderr.splitlines() == list(lines)
    assert done.returncode == code


# ---- bad input -----------------------------------------------------------------------------


def test_an_unknown_flavour(host):
    done = host.build("--flavour", "gpu")
    assert_refused(done, "image: error: FLAVOUR=gpu is unknown; wanted one of: cpu")
    assert not host.output.parent.exists()


def test_an_unknown_base_is_one_line_too(host):
    done = host.build("--base", "fedora")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("image.py: error: argument --base: invalid choice: 'fedora'")


def test_a_torchvision_that_is_not_locked(host, old_image):
    done = host.build("--torchvision", "9.9")
    wanted = "wanted auto, none or the locked 0.28.0+cpu"
    assert_refused(done, f"image: error: TORCHVISION=9.9: {wanted}")
    assert labels_of(old_image) == OLD
    assert host.leftovers() == []


def test_a_directory_as_output(host):
    """Told at once, not after minutes of building."""
    host.output.mkdir(parents=True)
    done = host.build()
    name = f"{host.output} is a directory, wanted a file: OUT={host.output}/image.sif"
    assert_refused(done, f"image: error: OUT={name}")
    assert host.built_layers() == []


def test_each_problem_of_the_host_has_its_line(host):
    """No space and a bad proxy: both are told, nothing is begun."""
    host.wanted_bytes = dict.fromkeys(host.wanted_bytes, 1 << 60)
    done = host.build(https_proxy="proxy:3128")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert [line.split()[2] for line in lines] == [
        "temporary", "cache", "output", "https_proxy=proxy:3128",
    ]  # fmt: skip
    assert all(line.startswith("image: error: ") for line in lines)
    assert not host.output.parent.exists()


def test_no_runtime(host):
    (host.bin / "apptainer").unlink()
    for name in ("git", "sh"):
        (host.bin / name).symlink_to(f"/usr/bin/{name}")
    done = host.build(PATH=host.bin)
    remedy = "run `make setup` (or `module load` it)"
    assert_refused(done, f"image: error: no apptainer or singularity in PATH: {remedy}")


def test_a_payload_that_cannot_be_read(host, old_image):
    (host.tree / "payload/link").symlink_to("nowhere")
    done = host.build()
    what = f"{host.tree}/payload/link: wanted a regular file or a link to one; remove it"
    assert_refused(done, f"image: error: {what}")
    assert labels_of(old_image) == OLD


# ---- an image that is no image -------------------------------------------------------------


@pytest.mark.parametrize("where", ["image", "layer"])
@pytest.mark.parametrize("damage", ["half", "a byte less", "empty", "garbage"])
def test_a_half_built_image_is_built_again(built, where, damage):
    """Also the cached layer: both carry the right key in their first half."""
    host = built
    victim = host.output if where == "image" else next(host.layers.glob("*.sif"))
    whole = victim.read_bytes()
    if where == "layer":
        host.edit("payload/hello.py")
    victim.write_bytes(
        {
            "half": whole[: len(whole) // 2],
            "a byte less": whole[:-1],
            "empty": b"",
            "garbage": b"x" * 9999,
        }[damage]
    )
    assert host.build().returncode == 0
    assert host.built_layers() == (["payload"] if where == "image" else ["deps", "payload"])
    assert len(victim.read_bytes()) == len(whole)


# ---- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("fail", "E: Unable to fetch some archives"),
        ("no-network", "no network (FATAL: While pulling image: dial tcp 127.0.0.1:1: connect:"),
    ],
)
def test_a_failed_build_keeps_the_old_image(host, old_image, kind, cause):
    """The last line tells the cause and where the log is, the lines before it are the log's."""
    before = hashlib.sha256(old_image.read_bytes()).hexdigest()
    done = host.build(FAKE_APPTAINER=kind)
    assert done.returncode == 1
    *shown, last = done.stderr.splitlines()
    assert all(line.startswith("  ") for line in shown)
    assert last.startswith(f"image: error: apptainer failed: {cause}")
    assert last.endswith(f"; log: {old_image}.log")
    assert hashlib.sha256(old_image.read_bytes()).hexdigest() == before
    assert host.leftovers() == []
    assert host.build().returncode == 0, "the next one is undisturbed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_build_leaves_nothing(host, old_image, number):
    build = host.start_slow_build()
    build.send_signal(number)
    out, err = build.communicate(timeout=60)
    assert (build.returncode, err) == (
        130, f"image: stopped by {number.name}; nothing was changed\n",
    )  # fmt: skip
    assert host.survivors() == []
    assert host.leftovers() == []
    assert labels_of(old_image) == OLD


def test_a_killed_build_leaves_what_the_next_one_clears_away(host, old_image):
    """kill -9: its children end, the old image stays, and the next build succeeds."""
    build = host.start_slow_build()
    build.kill()
    build.communicate(timeout=60)
    assert host.survivors() == []
    assert labels_of(old_image) == OLD
    (workspace,) = host.leftovers()
    done = host.build()
    assert f"removing {host.temporary / workspace}, left by a process" in done.stdout
    assert done.returncode == 0
    assert labels_of(old_image) != OLD
    assert host.leftovers() == []


def test_of_two_builds_the_second_is_refused(host):
    """It names the first, which goes on as if nothing had been."""
    gate = host.path / "gate"
    first = host.start("image.py", "build", FAKE_APPTAINER="gate", FAKE_GATE=gate)
    assert first.stdout.readline().startswith("building")
    second = host.build()
    who = f"process {first.pid} on {os.uname().nodename}"
    assert_refused(
        second,
        f"image: error: another build of Pytorch_DL_HPC-cpu.sif is running ({who}): wait for it,"
        f" or `kill {first.pid}`",
    )
    gate.touch()
    _, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (0, "")
    assert host.built_layers() == ["deps", "payload"]
    assert host.leftovers() == []


def test_builds_of_two_images_share_the_layer(host, tmp_path):
    """The second waits for the first one's dependencies instead of making them twice."""
    gate = host.path / "gate"
    first = host.start("image.py", "build", FAKE_APPTAINER="gate", FAKE_GATE=gate)
    for line in first.stdout:
        if line.startswith("dependencies:"):
            break
    second = host.start("image.py", "build", "--out", tmp_path / "other.sif")
    seen = [second.stdout.readline(), second.stdout.readline()]
    assert seen[1].startswith(f"waiting for another build's dependencies (process {first.pid} on")
    gate.touch()
    for build in (first, second):
        assert build.communicate(timeout=60)[1] == ""
        assert build.returncode == 0
    assert sorted(host.built_layers()) == ["deps", "payload", "payload"]


@pytest.mark.parametrize("full", ["temporary", "cache", "output"])
def test_a_disk_that_fills_up(host, old_image, full):
    """TMPDIR while the runtime writes; cache and output when a finished file is moved there."""
    if full == "temporary":
        done = host.build(wrapper=small_disk(host.temporary, "4m"), FAKE_APPTAINER="full")
    elif full == "cache":
        base = host.cache.rename(host.path / "base")
        host.cache.mkdir()
        disk = f"mount -t tmpfs -o size=24k none '{host.cache}' && cp -r '{base}'/* '{host.cache}'"
        done = host.build(wrapper=in_namespace(disk))
    else:
        (host.path / "small").mkdir()
        out = host.path / "small/x.sif"
        assert host.build("--out", out, wrapper=small_disk(out.parent, "64k")).returncode == 0
        done = host.build("--out", out, wrapper=small_disk(out.parent, "16k"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("image: error: ")
    assert "the disk is full" in last
    assert "choose other directories with TMPDIR=… XDG_CACHE_HOME=… OUT=…" in last
    assert labels_of(old_image) == OLD
    assert host.leftovers() == []


def test_a_read_only_tree(host):
    """One line with the remedy, and the remedy works."""
    done = host.build(wrapper=read_only(host.tree))
    where = f"output directory {host.tree} is not writable"
    assert_refused(done, f"image: error: {where}: make image OUT=/big/directory/image.sif")
    done = host.build("--out", host.path / "x.sif", wrapper=read_only(host.tree))
    assert (done.returncode, done.stderr) == (0, "")
