#!/bin/bash
# The machines of the test cluster; cluster.py is the only caller.
#   node.sh probe                      can this machine have nodes?
#   node.sh control                    run the controller
#   node.sh run CLUSTER NODE ADDRESS   become a node; its eth0 comes from outside
#   node.sh sweep CLUSTER              remove the cgroups of a cluster whose processes are dying
# Called in a mount namespace of its own, so that no mount is seen outside.
# SLURM_CONF names the configuration; the nodes' /etc/hosts lies beside it.
set -euo pipefail

namespaces=(--net --uts --ipc --mount --pid --cgroup --fork --kill-child --mount-proc)

# freezer is the cgroup v1 controller by which Slurm follows processes without systemd. Hosts that
# use cgroup v2 can mount it as well.
mount_freezer() {
    mount -t cgroup -o freezer none "$1"
}

probe() {
    mount_freezer /sys/fs/cgroup
    unshare "${namespaces[@]}" sh -euc \
        'mount -t sysfs none /sys; ip link add br0 type bridge; ip link add eth0 type veth'
}

# In its /etc/hosts the controller's name is an address of the bridge, the only one to listen at.
# It leaves a helper behind when it is killed, unless both are in a process namespace.
control() {
    mount --bind "${SLURM_CONF%/*}/hosts" /etc/hosts
    exec unshare --pid --fork --kill-child --mount-proc slurmctld -D -c -i
}

# A node has a cgroup of its own before it has namespaces, so that the jobs of two clusters never
# meet although they have the same numbers.
run() {
    mount_freezer /sys/fs/cgroup
    mkdir -p "/sys/fs/cgroup/$1/$2"
    echo $$ >"/sys/fs/cgroup/$1/$2/cgroup.procs"
    umount /sys/fs/cgroup
    exec unshare "${namespaces[@]}" "$0" boot "$2" "$3"
}

boot() {
    hostname "$1"
    until ip link set eth0 up 2>/dev/null; do sleep 0.02; done
    ip link set lo up
    ip address add "$2/24" dev eth0
    mount -t sysfs none /sys
    mount -t tmpfs -o mode=755 none /sys/fs/cgroup
    mkdir /sys/fs/cgroup/freezer
    mount_freezer /sys/fs/cgroup/freezer
    mount -t tmpfs -o mode=1777,nosuid,nodev none /dev/shm
    mount --bind "${SLURM_CONF%/*}/hosts" /etc/hosts
    slurmd -D -N "$1" || exit # not exec: bash stays to reap the orphans of jobs
}

# Frozen processes do not die, and dying ones keep their cgroup for a moment.
sweep() {
    mount_freezer /sys/fs/cgroup
    cd /sys/fs/cgroup
    while [ -d "$1" ]; do
        find "$1" -name freezer.state | while read -r file; do echo THAWED >"$file" || true; done
        find "$1" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.02
    done
}

"$@"
