"""The scripts are importable, and every test may have a host of its own."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from hosts import Host, tiny_base  # noqa: E402


@pytest.fixture
def host(tmp_path):
    """A host with a fake apptainer."""
    return Host(tmp_path).fake_apptainer()


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A host with a fake apptainer where the image is built."""
    host = Host(tmp_path_factory.mktemp("template")).fake_apptainer()
    assert host.build().returncode == 0
    return host


def copy_images(source, target):
    for old, new in ((source.layers, target.layers), (source.output.parent, target.output.parent)):
        new.mkdir(exist_ok=True)
        for image in old.glob("*.sif"):
            shutil.copy(image, new)
    return target


@pytest.fixture
def built(host, template):
    """A host with a fake apptainer, and image and layer as the template's build left them."""
    return copy_images(template, host)


@pytest.fixture(scope="session")
def base_archive(tmp_path_factory):
    work = tmp_path_factory.mktemp("base")
    tiny_base(work / "base.tar", work)
    return work / "base.tar"


@pytest.fixture
def real_host(tmp_path, base_archive):
    """A host with this machine's apptainer, and a tiny base in its cache instead of Debian."""
    return make_real(tmp_path, base_archive)


def make_real(path, base_archive):
    host = Host(path)
    host.tarball.unlink()
    host.tarball.symlink_to(base_archive)
    return host


@pytest.fixture(scope="session")
def real_template(tmp_path_factory, base_archive):
    """A host with this machine's apptainer where the image is built."""
    host = make_real(tmp_path_factory.mktemp("real"), base_archive)
    done = host.build()
    assert done.returncode == 0, done.stderr
    return host


@pytest.fixture
def real_built(real_host, real_template):
    """As real_host, and the image and its layer are there."""
    return copy_images(real_template, real_host)
