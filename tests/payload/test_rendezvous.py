"""Where the ranks meet: address, port, interface."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from pathlib import Path

import pytest
from environments import MPICH, OPENMPI, SRUN, TORCHRUN, without
from hpcdist import LaunchError, identify, network
from hpcdist.rendezvous import (
    Job,
    Meeting,
    choose_port,
    identify_job,
    is_loopback,
    list_ports,
    plan,
)

ONE_NODE_MPIRUN = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}


def meet(environ: dict[str, str]) -> Meeting | None:
    return plan(environ, identify(environ))


def certainly(meeting: Meeting | None) -> Meeting:
    assert meeting is not None
    return meeting


def task(rank: int, local: int, node: int) -> dict[str, str]:
    numbers = {"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node}
    return {**SRUN, **{name: str(value) for name, value in numbers.items()}}


def test_srun_meets_on_the_first_host_of_the_step() -> None:
    meeting = certainly(meet(SRUN))
    assert meeting.host == "n9"
    assert "SLURM_STEP_NODELIST=n[9-11]" in meeting.evidence
    assert not meeting.listens


def test_all_tasks_of_a_step_come_to_the_same_and_one_listens() -> None:
    tasks = [task(0, 0, 0), task(1, 1, 0), task(2, 0, 1), task(3, 1, 1), task(4, 0, 2)]
    meetings = [certainly(meet(environ)) for environ in tasks]
    assert len({(m.host, m.port, m.identity) for m in meetings}) == 1
    assert [m.listens for m in meetings] == [True, False, False, False, False]


def test_with_arbitrary_distribution_the_first_node_listens_and_not_rank_0() -> None:
    """As measured for `srun -n3 -m arbitrary -w n2,n1,n2`: rank 0 is on the second node."""
    step = {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2",
            "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_DISTRIBUTION": "arbitrary",
            "SLURM_NTASKS": "3"}  # fmt: skip
    on_first = {**step, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    rank_0 = {**step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    assert certainly(meet(on_first)).host == certainly(meet(rank_0)).host == "n1"
    assert certainly(meet(on_first)).listens
    assert not certainly(meet(rank_0)).listens


def test_the_launch_node_is_never_the_master() -> None:
    """SLURM_LAUNCH_NODE_IPADDR is where srun was typed, maybe a login node."""
    assert meet(SRUN) == meet(without(SRUN, "SLURM_LAUNCH_NODE_IPADDR"))


def test_preset_address_and_port_are_honoured() -> None:
    meeting = certainly(meet({**task(0, 0, 0), "MASTER_ADDR": "n11", "MASTER_PORT": "4711"}))
    assert (meeting.host, meeting.port, meeting.listens) == ("n11", 4711, True)


def test_either_one_may_be_preset() -> None:
    assert certainly(meet({**SRUN, "MASTER_PORT": "4711"})).host == "n9"
    assert certainly(meet({**SRUN, "MASTER_PORT": "4711"})).port == 4711
    assert certainly(meet({**SRUN, "MASTER_ADDR": "n11"})).port == certainly(meet(SRUN)).port


def test_ipv6_literals_are_taken_with_and_without_brackets() -> None:
    for text in ("[fd00::17]", "fd00::17"):
        preset = {**SRUN, "MASTER_ADDR": text, "MASTER_PORT": "4711"}
        assert certainly(meet(preset)).host == "fd00::17"


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]",
                                     "LOCALHOST.", "::ffff:127.0.0.1", "0.0.0.0"])  # fmt: skip
def test_loopback_is_refused_on_several_nodes_only(address: str) -> None:
    assert is_loopback(address)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=\S+ means another machine.*3 nodes"):
        meet({**SRUN, "MASTER_ADDR": address})
    preset = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "4711"}
    assert certainly(meet(preset)).port == 4711


@pytest.mark.parametrize("address", ["n1", "10.0.0.1", "fd00::1", "localhost-gw.example.org"])
def test_other_addresses_are_no_loopbacks(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1"])
def test_bad_preset_port_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        meet({**SRUN, "MASTER_PORT": port})


def test_ranks_set_by_hand_must_say_where_they_meet() -> None:
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        meet({"RANK": "0", "WORLD_SIZE": "2"})


def test_torchrun_has_met_already() -> None:
    meeting = certainly(meet(TORCHRUN))
    assert (meeting.host, meeting.port) == ("n9", 29511)
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT"):
        meet(without(TORCHRUN, "MASTER_ADDR"))


def test_mpirun_on_one_node_needs_no_mpi_to_meet() -> None:
    meeting = certainly(meet(ONE_NODE_MPIRUN))
    assert meeting.host == "127.0.0.1"
    other = {**ONE_NODE_MPIRUN, "PMIX_NAMESPACE": "prterun-n9-93@1"}
    assert certainly(meet(other)).port != meeting.port
    assert certainly(meet(other)).identity != meeting.identity


@pytest.mark.parametrize(
    "environ",
    [
        OPENMPI,  # several nodes: which of them has rank 0?
        {**OPENMPI, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]"},
        # One node, but nothing that is common to the ranks and no other job's: two mpiexecs may
        # run at once in one Slurm or PBS job.
        {**MPICH, "MPI_LOCALNRANKS": "4", "SLURM_JOB_ID": "7"},
    ],
)
def test_only_mpi_can_tell(environ: dict[str, str]) -> None:
    assert meet(environ) is None


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (SRUN, (7, 1)),
        ({**SRUN, "PMIX_NAMESPACE": "slurm.pmix.7.1"}, (7, 1)),
        ({**SRUN, "SLURM_HET_JOB_ID": "6"}, (6, 1)),
        (OPENMPI, (92, 1)),
        ({**OPENMPI, "PMIX_NAMESPACE": str(4711 << 16 | 1)}, (4711, 1)),  # Open MPI 4
        # The step that mpirun's daemons run in is no sign of the job: not all ranks have it.
        ({**SRUN, **without(OPENMPI, "PMIX_NAMESPACE")}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({}, None),
    ],
)
def test_identify_job(environ: dict[str, str], job: tuple[int, int] | None) -> None:
    found = identify_job(environ)
    assert (found and (found.number, found.step)) == job


def test_neighbouring_jobs_and_steps_never_share_a_port() -> None:
    pairs = itertools.product(range(1000, 1061), range(140))
    ports = [choose_port(Job(number, step, "")) for number, step in pairs]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("first", range(32766, 32772))
def test_the_same_step_of_two_jobs_shares_a_port_only_far_apart(first: int) -> None:
    ephemeral = (first, 60999)
    low, high = list_ports(ephemeral)
    ports = {choose_port(Job(number, 0, ""), ephemeral) for number in range(high - low)}
    assert len(ports) == high - low


@pytest.mark.parametrize(
    ("ephemeral", "ports"),
    [
        ((32768, 60999), (10000, 32768)),
        ((49152, 65535), (10000, 49152)),
        ((9000, 60999), (1024, 9000)),
        ((1024, 60999), (61000, 65536)),
        ((1024, 65535), (10000, 32768)),  # nothing is left: the bind test must tell
    ],
)
def test_ports_avoid_what_the_kernel_gives_away(
    ephemeral: tuple[int, int], ports: tuple[int, int]
) -> None:
    assert list_ports(ephemeral) == ports
    for number in (0, 1, 7, 99999, 4294967295):
        assert ports[0] <= choose_port(Job(number, 3, ""), ephemeral) < ports[1]


def test_ephemeral_range_is_the_nodes_own(tmp_path: Path) -> None:
    file = tmp_path / "ip_local_port_range"
    file.write_text("20000\t30000\n")
    assert network.read_ephemeral_range(file) == (20000, 30000)
    assert network.read_ephemeral_range(tmp_path / "missing") == (32768, 60999)


def test_taken_port_is_named() -> None:
    with network.listen(0) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} is taken .*set MASTER_PORT"):
            network.listen(port)


def test_listener_answers_on_both_families() -> None:
    with network.listen(0) as listener:
        port = listener.getsockname()[1]
        network.wait_for_port("127.0.0.1", port, timeout=5)
        if socket.has_dualstack_ipv6():
            network.wait_for_port("::1", port, timeout=5)


def test_waiting_ends_with_the_host_and_the_reason() -> None:
    with network.listen(0) as listener:
        port = listener.getsockname()[1]
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=rf"127.0.0.1 port {port} within 0.5 s.*refused"):
        network.wait_for_port("127.0.0.1", port, timeout=0.5)
    with pytest.raises(LaunchError, match="cannot be resolved"):
        network.wait_for_port("no-such-host.invalid", port, timeout=0.2)
    assert time.monotonic() - begin < 10


def test_waiting_is_patient_with_a_late_listener() -> None:
    with network.listen(0) as listener:
        port = listener.getsockname()[1]
    late: list[socket.socket] = []
    timer = threading.Timer(0.5, lambda: late.append(network.listen(port)))
    timer.start()
    network.wait_for_port("127.0.0.1", port, timeout=10)
    timer.join()
    late[0].close()


def test_free_port_lies_below_the_ephemeral_range() -> None:
    low, high = list_ports(network.read_ephemeral_range())
    with network.listen_below_ephemeral(4711) as one, network.listen_below_ephemeral(4711) as two:
        ports = [one.getsockname()[1], two.getsockname()[1]]
    assert ports[0] != ports[1]
    assert all(low <= port < high for port in ports)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Host names and what they resolve to, instead of the resolver."""
    table: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def resolve(host: str, *args: object, **more: object) -> object:
        found = [real(text, *args, **more) for text in table.get(host, [host])]  # type: ignore
        return [entry for entries in found for entry in entries]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table


def test_names_that_resolve_to_loopbacks(names: dict[str, list[str]]) -> None:
    names.update(bad=["127.0.1.1"], good=["127.0.1.1", "192.0.2.7"])
    assert network.resolves_to_loopback("bad")
    assert not network.resolves_to_loopback("good")
    assert not network.resolves_to_loopback("no-such-host.invalid")


def test_this_host(names: dict[str, list[str]]) -> None:
    names.update(alias=["127.0.0.1"], other=["192.0.2.7"])
    assert network.is_this_host(socket.gethostname())
    assert network.is_this_host(socket.gethostname() + ".example.org")
    assert network.is_this_host("alias")
    assert not network.is_this_host("other")


def test_interfaces() -> None:
    assert network.find_interface("127.0.0.1") == "lo"
    assert network.find_interface("::ffff:127.0.0.1") == "lo"
    assert network.find_interface("192.0.2.7") is None
    assert network.find_interface("no address") is None
    if Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text():
        assert network.find_interface("::1") == "lo"


def test_own_address_is_never_a_loopback() -> None:
    assert network.find_own_address(["127.0.0.1", "localhost", "no-such-host.invalid"]) is None
