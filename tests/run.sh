#!/usr/bin/env bash
# Run the tests (make test-unit, make test-local) or the linters (make lint).
#   tests/run.sh unit|all|conformance|lint [pytest's arguments]
# What they need is installed: tools of their own in the cache, Debian packages where root runs this.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/pytorch-dl-hpc

install_packages() { # install_packages NAME…: as root; else say what to ask for
    if [[ $(id -u) != 0 ]]; then
        echo "run.sh: error: $* missing: ask root for \`apt-get install $*\`" >&2
        exit 1
    fi
    echo "changed: apt-get install $*"
    apt-get -o DPkg::Lock::Timeout=300 -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -qq install -y \
        --no-install-recommends "$@" > /dev/null
}

prepare_tools() { # PYTHON: a Python with pytest, ruff and mypy, made anew when their lock changes
    local version key place fresh
    version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    key=$(sha256sum tests/requirements.txt | cut -c1-12)
    place=$cache/tools/$version-$key
    PYTHON=$place/bin/python
    if [[ -x $PYTHON ]]; then return; fi
    python3 -c 'import ensurepip' 2> /dev/null || install_packages python3-venv
    mkdir -p "$cache/tools"
    fresh=$(mktemp -d "$cache/tools/.new-XXXXXX")
    python3 -m venv "$fresh"
    "$fresh/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r tests/requirements.txt
    # Its programs carry the old path in their first line; `python -m` needs none of them.
    mv -T "$fresh" "$place" 2> /dev/null || rm -rf "$fresh" # another run was faster
}

FILTER=() # pytest's arguments of the user: where none of a part's tests match, that is no failure

run_pytest() { # run_pytest COMMAND… -- PATHS AND OPTIONS: pytest by that Python
    local runner=() code=0
    while [[ $1 != -- ]]; do runner+=("$1") && shift; done
    "${runner[@]}" -m pytest -p no:cacheprovider "${@:2}" ${FILTER[@]+"${FILTER[@]}"} || code=$?
    if [[ $code == 5 && ${#FILTER[@]} -gt 0 ]]; then return 0; fi
    return "$code"
}

run_unit() { # what needs neither image nor cluster
    prepare_tools
    run_pytest "$PYTHON" -- tests --ignore tests/image --ignore tests/torch_mpi -m "not image and not slurm and not slow" -q
}

run_all() {
    prepare_tools
    tests/slurm/install.sh
    command -v docker-registry > /dev/null || install_packages docker-registry
    # In such a run a skip that nobody expects is a failure (tests/conftest.py).
    export STRICT_SKIPS=1
    # shellcheck source=scripts/jobs/common.sh
    source scripts/jobs/common.sh
    set_container
    local inside failed=0 # every part runs, so that one run shows all that is broken
    for inside in tests/image tests/payload tests/torch_mpi; do
        echo "== inside the image: $inside"
        run_pytest "${CONTAINER[@]}" python -- "$inside" -m "not conformance" || failed=1
    done
    echo "== on the host: tests/scripts, tests/slurm and the rest"
    run_pytest "$PYTHON" -- tests --ignore tests/image --ignore tests/payload --ignore tests/torch_mpi || failed=1
    return $failed
}

run_conformance() { # torch's own suite for backends, on the mpi backend
    # shellcheck source=scripts/jobs/common.sh
    source scripts/jobs/common.sh
    set_container
    run_pytest "${CONTAINER[@]}" python -- tests/torch_mpi -m conformance
}

run_lint() {
    prepare_tools
    command -v shellcheck > /dev/null || install_packages shellcheck
    "$PYTHON" -m ruff check --output-format concise .
    "$PYTHON" -m ruff format --check --quiet . || { echo "lint: run \`ruff format\`" >&2; return 1; }
    "$PYTHON" -m mypy
    local scripts
    mapfile -t scripts < <(git ls-files --cached --others --exclude-standard '*.sh' '*.sbatch' .ci/run)
    shellcheck -x "${scripts[@]}"
    echo "lint: ok"
}

case ${1:-} in
unit | all | conformance | lint)
    FILTER=("${@:2}")
    "run_$1"
    ;;
*) echo "usage: tests/run.sh unit|all|conformance|lint [pytest's arguments]" >&2; exit 2 ;;
esac
