#!/bin/bash
# Install what the two-node test cluster (cluster.py) runs on: Slurm's daemons and clients, munge,
# PMIx and iproute2. For Debian 12 and 13. Where all of it is there, it does nothing, in a moment.
set -euo pipefail

# Debian 13 has libpmix2t64, which provides libpmix2.
packages=(slurmd slurmctld slurm-client munge libpmix2 iproute2)

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Print the wanted packages that are not installed.
missing_packages() {
    local have package
    have=$(dpkg-query -W -f '${db:Status-Status} ${Package} ${Provides}\n' \
        "${packages[@]}" libpmix2t64 2>/dev/null | sed -n 's/^installed / /p') || true
    for package in "${packages[@]}"; do
        [[ "$have" =~ [[:space:]]"$package"([[:space:]]|$) ]] || echo "$package"
    done
}

# RUNLEVEL=1 keeps invoke-rc.d from starting what it installs, and systemctl undoes what systemd
# starts at boot: cluster.py starts daemons of its own, with a configuration of its own.
install_packages() {
    echo "installing $*"
    if ! apt-cache show slurmd >/dev/null 2>&1; then
        as_root apt-get update -qq
    fi
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    if [ -d /run/systemd/system ]; then
        as_root systemctl --quiet disable --now munge slurmd slurmctld || true
    fi
}

# Debian 12's `srun --mpi=pmix` opens libpmix.so in PMIx' own directory, a link that only
# libpmix-dev ships, which would bring a compiler.
link_pmix() {
    local library
    library=$(dpkg-query -S '*/pmix2/lib/libpmix.so.2' | sed 's/.*: //')
    [ -e "${library%.2}" ] || as_root ln -sfn libpmix.so.2 "${library%.2}"
}

missing=$(missing_packages)
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # one word for each package
    install_packages $missing
fi
link_pmix
