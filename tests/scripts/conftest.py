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


@pytest.fixture
def built(host, template):
    """A host with a fake apptainer, and the image and its layer as the template's build left them."""
    for directory in (host.output.parent, host.layers):
        directory.mkdir()
    for source, target in (
        (template.output.parent, host.output.parent),
        (template.layers, host.layers),
    ):
        for image in source.glob("*.sif"):
            shutil.copy(image, target)
    return host


@pytest.fixture(scope="session")
def base_archive(tmp_path_factory):
    work = tmp_path_factory.mktemp("base")
    tiny_base(work / "base.tar", work)
    return work / "base.tar"


@pytest.fixture
def real_host(tmp_path, base_archive):
    """A host with this machine's apptainer, and a tiny base in its cache instead of Debian."""
    real = Host(tmp_path)
    real.tarball.unlink()
    real.tarball.symlink_to(base_archive)
    return real
