"""Installing torch_mpi changes nothing for programs that never ask for mpi. No mpirun needed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")
torch_mpi = pytest.importorskip("torch_mpi")


def python(code, env=None, path=None):
    """Run code in a fresh Python; return (status, output)."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))
    }
    environment.update(env or {})
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout + result.stderr


def fake_package(folder, **files):
    """Write a copy of torch_mpi's Python files with some of them replaced, to be found first."""
    package = folder / "torch_mpi"
    package.mkdir()
    for source in Path(torch_mpi.__file__).parent.glob("*.py"):
        (package / source.name).write_text(source.read_text())
    for name, text in files.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


ASK = """
import torch.distributed as dist
try:
    dist.init_process_group("mpi")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_import_torch_offers_mpi_and_starts_nothing():
    status, output = python("""
        import sys, torch, torch.distributed as dist
        assert dist.is_mpi_available()
        assert dist.Backend("mpi") == dist.Backend.MPI == "mpi"
        assert "torch_mpi" in sys.modules
        assert "torch_mpi._C" not in sys.modules
        assert "torch_mpi._process" not in sys.modules
        assert not any("libmpi" in line for line in open("/proc/self/maps"))
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        dist.new_group([0])
        dist.destroy_process_group()
        assert "torch_mpi._C" not in sys.modules
        print("untouched")
    """)
    assert status == 0 and "untouched" in output, output


def test_singleton_works_without_mpirun():
    status, output = python("""
        import torch, torch.distributed as dist
        dist.init_process_group("mpi")
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        t = torch.arange(3.)
        dist.all_reduce(t)
        assert t.tolist() == [0, 1, 2]
        print("alone")
    """)
    assert status == 0 and "alone" in output, output


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"_extension": "raise OSError('libmpi.so.40: cannot open shared object file')"},
            "libmpi.so.40",
        ),
        ({"_hooks": "raise RuntimeError('torch has moved')"}, "torch has moved"),
        ({"_hooks": "import sys; sys.exit(7)"}, "SystemExit(7)"),
        ({"_built": "TORCH_VERSION = '1.0.0'\nMPICXX = 'mpicxx'"}, "compiled for torch 1.0.0"),
        ({}, "torch_mpi._C"),  # the copy has no compiled part
    ],
)
def test_whatever_is_broken_torch_can_be_imported(tmp_path, files, words):
    folder = fake_package(tmp_path, **files)
    status, output = python("import torch; print(torch.ones(2).sum().item())" + ASK, path=folder)
    assert status == 0 and "2.0" in output and words in output, output


def test_a_torch_with_its_own_mpi_is_left_alone(tmp_path):
    status, output = python("""
        import os
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch.distributed.distributed_c10d as c10d
        c10d._MPI_AVAILABLE, c10d.ProcessGroupMPI = True, "its own"
        helper = c10d._new_process_group_helper
        import torch_mpi
        torch_mpi.autoload()
        assert c10d.ProcessGroupMPI == "its own" and c10d._new_process_group_helper is helper
        print("left alone")
    """)
    assert status == 0 and "left alone" in output, output


def test_wrong_library_is_named():
    """The launcher says 4, MPI says 1: as with a libmpi that does not know the launcher."""
    for env, words in (
        ({"SLURM_STEP_NUM_TASKS": "4"}, ("SLURM_STEP_NUM_TASKS=4", "--mpi=pmix", "libmpi")),
        ({"PMI_SIZE": "4"}, ("PMI_SIZE=4", "MPI has 1 rank", "libmpi")),
    ):
        status, output = python(ASK, env=env)
        assert "RuntimeError" in output and all(w in output for w in words), output


def test_autoload_costs_little():
    """A generous bound: the hook must neither start MPI nor import the extension."""
    status, output = python("""
        import os, time
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch, torch.distributed
        start = time.process_time()
        import torch_mpi
        torch_mpi.autoload()
        print("seconds", time.process_time() - start)
    """)
    assert status == 0, output
    assert float(output.split()[-1]) < 0.05, output


def test_launcher_sizes():
    from torch_mpi._launch import check_size, expected_size

    assert expected_size({}) == (None, None)
    assert expected_size({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}) == (
        8,
        "OMPI_COMM_WORLD_SIZE",
    )
    assert expected_size({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "9"})[0] == 2
    assert expected_size({"SLURM_NTASKS": "9"}) == (None, None)  # a batch script is one process
    check_size(2, "Open MPI", {"OMPI_COMM_WORLD_SIZE": "2"})
    with pytest.raises(RuntimeError, match="--mpi=pmix"):
        check_size(1, "Open MPI", {"SLURM_STEP_NUM_TASKS": "2"})
