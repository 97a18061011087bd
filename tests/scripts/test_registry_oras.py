"""`make pull` from a real registry by the machine's own apptainer, and what can go wrong there."""

import hashlib
import subprocess

import pytest
from imagebuild.sif import read_labels
from registry_server import free_port, serve

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(scope="module")
def uri(registry, real_template):
    """The image in the registry."""
    reference = f"oras://{registry}/project/image:1"
    push = ["apptainer", "push", "--no-https", str(real_template.output), reference]
    subprocess.run(push, capture_output=True, check=True)
    return reference


@pytest.fixture
def target(real_host):
    """An image of no value that must survive what fails."""
    real_host.output.parent.mkdir()
    real_host.output.write_bytes(b"old")
    return real_host.output


def pull(host, uri, *options):
    return host.run("registry.py", "pull", uri, "--out", host.output, *options)


def test_what_was_pushed_is_what_is_pulled(real_host, real_template, uri):
    """Byte for byte: so the checksum that was noted at the push can be asked for."""
    digest = hashlib.sha256(real_template.output.read_bytes()).hexdigest()
    done = pull(real_host, uri, "--sha256", digest)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"sha256 {digest}" in done.stdout
    assert real_host.output.read_bytes() == real_template.output.read_bytes()
    assert read_labels(real_host.output)["flavour"] == "cpu"
    assert real_host.leftovers() == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda uri: uri.replace(":1", ":2"), "MANIFEST_UNKNOWN"),
        (lambda uri: f"oras://127.0.0.1:{free_port()}/project/image:1", "no network (FATAL: "),
        (lambda uri: "oras://x", "could not parse reference"),
    ],
    ids=["unknown tag", "dead registry", "no reference"],
)
def test_a_failed_pull_is_one_line_and_keeps_the_old_image(real_host, target, uri, change, part):
    asked = change(uri)
    done = pull(real_host, asked)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pull: error: {asked}: ")
    assert part in line
    assert target.read_bytes() == b"old"
    assert real_host.leftovers() == []


def test_a_wrong_checksum_keeps_the_old_image(real_host, target, uri):
    done = pull(real_host, uri, "--sha256", "0" * 64)
    assert done.returncode == 1
    assert f", wanted {'0' * 64}" in done.stderr
    assert target.read_bytes() == b"old"
    assert real_host.leftovers() == []


def test_half_an_image_is_refused(real_host, real_template, target):
    """The runtime reads its labels without complaint; the bytes that are missing are noticed."""
    half = real_host.path / "half.sif"
    whole = real_template.output.read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    done = pull(real_host, half)
    assert done.returncode == 1
    assert done.stderr == f"pull: error: {half}: not a whole image: fetch it again\n"
    assert target.read_bytes() == b"old"
