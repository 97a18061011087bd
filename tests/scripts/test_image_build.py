"""The build with the machine's own apptainer: the real definition's shape, a base of kilobytes."""

import os
import re
import signal
import subprocess

import pytest
from hosts import small_disk
from imagebuild.sif import is_whole, read_labels

pytestmark = pytest.mark.image


def execute(image, *command):
    done = subprocess.run(
        ["apptainer", "exec", str(image), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sleep_in_post(host):
    """Let %post of the payload's layer sleep; returns what its command line has."""
    marker = f"31536.{os.getpid()}"
    (host.tree / "payload/post.sh").write_text(
        f'sleep {marker} &\necho "==> sleeping"; sleep {marker}\n'
    )
    return marker


def start_sleeping_build(host):
    build = host.start("image.py", "build")
    for line in build.stdout:
        if line.endswith("] sleeping\n"):
            return build
    pytest.fail(build.communicate()[1])
    return None


def test_an_image_is_built_labelled_and_runs(real_template):
    """Two layers become one image with the payload's labels; nothing else is left."""
    host = real_template
    labels = read_labels(host.output)
    assert is_whole(host.output)
    assert labels["content-key"] == host.run("image.py", "key").stdout.strip()
    assert labels["org.opencontainers.image.version"] == "1.2.3"
    assert labels["org.opencontainers.image.revision"] == "unknown"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}Z", labels["org.opencontainers.image.created"])
    assert labels["flavour"] == "cpu"
    assert labels["version.torchvision"] == "none"
    assert str(host.path) not in str(labels)
    assert execute(host.output, "cat", "/opt/payload/hello.py") == "print('hello')\n"
    assert host.leftovers() == []
    assert host.build().stdout.startswith(f"{host.output}: up to date")


def test_a_payload_change_is_built_on_the_cached_layer(real_built):
    (real_built.tree / "payload/hello.py").write_text("print('changed')\n")
    done = real_built.build()
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^dependencies: layer \w{16} from the cache$", done.stdout, re.M)
    assert execute(real_built.output, "cat", "/opt/payload/hello.py") == "print('changed')\n"


def test_a_cut_image_is_built_again(real_built):
    """Half of it shows its labels all the same (test_sif.py)."""
    size = real_built.output.stat().st_size
    with real_built.output.open("r+b") as file:
        file.truncate(size // 2)
    assert real_built.build().returncode == 0
    assert is_whole(real_built.output)


def test_settings_reach_post_but_neither_image_nor_log(real_built):
    """A proxy with its password is there during %post, and nowhere afterwards."""
    (real_built.tree / "payload/post.sh").write_text(
        'echo "==> $http_proxy"; [ ${#http_proxy} = 23 ]\n'
    )
    done = real_built.build(http_proxy="http://u:secret@proxy:1")
    assert done.returncode == 0, done.stderr
    assert "] http://***@proxy:1\n" in done.stdout
    assert "secret" not in done.stdout + real_built.build_log()
    assert execute(real_built.output, "ls", "-A", "/mnt") == ""
    unpacked = real_built.path / "unpacked"
    subprocess.run(
        ["apptainer", "build", "--sandbox", str(unpacked), str(real_built.output)],
        capture_output=True,
        check=True,
    )
    found = subprocess.run(["grep", "-rl", "secret@proxy", str(unpacked)], capture_output=True)
    assert (found.returncode, found.stdout) == (1, b"")


def test_umask_077_makes_an_image_for_everybody(real_built):
    """What the image holds does not depend on who built it."""
    real_built.edit("payload/hello.py")
    done = real_built.build(wrapper=["sh", "-c", 'umask 077; exec "$@"', "sh"])
    assert done.returncode == 0, done.stderr
    modes = execute(real_built.output, "ls", "-ld", "/opt/payload", "/opt/payload/hello.py")
    assert [line[:10] for line in modes.splitlines()] == ["drwxr-xr-x", "-rw-r--r--"]


def test_a_failing_post_keeps_the_old_image(real_built):
    """The script's own words are the cause that is told."""
    before = real_built.output.read_bytes()
    (real_built.tree / "payload/post.sh").write_text("echo 'E: no such package'; false\n")
    done = real_built.build()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"image: error: apptainer failed: E: no such package; log: {real_built.output}.log"
    )
    assert real_built.output.read_bytes() == before
    assert real_built.leftovers() == []


def test_a_failing_test_section_keeps_the_old_image(real_built):
    """An image that does not pass its own %test never gets its name."""
    before = real_built.output.read_bytes()
    (real_built.tree / "payload/post.sh").write_text("rm /opt/payload/hello.py\n")
    assert real_built.build().returncode == 1
    assert real_built.output.read_bytes() == before


def test_kill_9_in_the_middle_of_post(real_built):
    """No process of the build survives, the old image does, and the next build succeeds."""
    before = real_built.output.read_bytes()
    marker = sleep_in_post(real_built)
    build = start_sleeping_build(real_built)
    assert real_built.survivors(marker, wait=False) != []
    build.kill()
    build.communicate(timeout=60)
    assert real_built.survivors(marker) == []
    assert real_built.output.read_bytes() == before
    (workspace,) = real_built.leftovers()
    (real_built.tree / "payload/post.sh").write_text("true\n")
    real_built.edit("payload/hello.py")
    done = real_built.build()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"removing {real_built.temporary / workspace}, left by a process" in done.stdout
    assert real_built.leftovers() == []
    assert real_built.output.read_bytes() != before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_post(real_built, number):
    before = real_built.output.read_bytes()
    marker = sleep_in_post(real_built)
    build = start_sleeping_build(real_built)
    build.send_signal(number)
    _, err = build.communicate(timeout=60)
    assert err == f"image: stopped by {number.name}; nothing was changed\n"
    assert build.returncode == 130
    assert real_built.survivors(marker) == []
    assert real_built.leftovers() == []
    assert real_built.output.read_bytes() == before


def test_a_full_disk_in_the_middle_of_the_build(real_host):
    """The runtime's own message is understood."""
    done = real_host.build(wrapper=small_disk(real_host.temporary, "6m"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "image: error: apptainer failed: the disk is full ("
    )
    assert not real_host.output.exists()
    assert not list(real_host.layers.glob("*.sif"))
    assert real_host.leftovers() == []


def test_spaces_in_all_paths(real_built):
    """Tree, temporary directory, cache, output."""
    host = real_built
    spaced = host.path / "a b"
    spaced.mkdir()
    host.tree = host.tree.rename(spaced / "the tree")
    (spaced / "tmp dir").mkdir()
    out = spaced / "my image.sif"
    done = host.build(
        "--out", out, TMPDIR=spaced / "tmp dir", XDG_CACHE_HOME=host.cache.rename(spaced / "c c")
    )
    assert done.returncode == 0, done.stderr
    assert is_whole(out)


def test_no_network(real_host):
    """A registry that cannot be reached: the cause, what to check, and where the log is."""
    done = real_host.build("--base", "docker", https_proxy="http://127.0.0.1:1")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("image: error: apptainer failed: no network (FATAL:")
    assert "check http_proxy, https_proxy, DEBIAN_MIRROR, PIP_INDEX_URL, PYTORCH_INDEX" in last
    assert last.endswith(f"; log: {real_host.output}.log")
