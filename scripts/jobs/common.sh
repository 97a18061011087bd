# shellcheck shell=bash
# Sourced by the job scripts beside it (and by demo.sh): one place for the container's flags, the
# hygiene of the environment, and the choice of what starts MPI ranks. Bash 4 or newer.
#
# In:   IMAGE   the SIF (default: build/Pytorch_DL_HPC-cpu.sif of this tree)
#       SITE    scripts/sites/SITE.sh, whose site_setup loads modules (default: generic)
#       BINDS   further directories for the container, as --bind takes them
#       MPI     pmix or mpirun, to overrule choose_mpi
# Out:  CONTAINER (array: apptainer exec with its flags and the image), OMP_NUM_THREADS

set -euo pipefail

PYTORCH_DL_HPC=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
IMAGE=${IMAGE:-$PYTORCH_DL_HPC/build/Pytorch_DL_HPC-cpu.sif}
SITE=${SITE:-generic}

fail() { # fail WHAT REMEDY: one line, and the job ends
    echo "${0##*/}: error: $1: $2" >&2
    exit 1
}

load_site() { # modules and binds of this cluster
    local file="$PYTORCH_DL_HPC/scripts/sites/$SITE.sh"
    if [[ ! -f $file ]]; then
        local known=("$PYTORCH_DL_HPC"/scripts/sites/*.sh)
        known=("${known[@]##*/}")
        fail "SITE=$SITE is unknown" "wanted one of: ${known[*]%.sh}"
    fi
    # shellcheck source=/dev/null
    source "$file"
    if declare -F site_setup > /dev/null; then site_setup; fi
}

clean_environment() {
    # What of the host's Python must not decide what runs inside (the image unsets it as well; this
    # keeps it from the host's mpirun and srun, too).
    unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV CONDA_PREFIX
    export PYTHONNOUSERSITE=1
    # One thread for each core of the task; without it every rank takes all cores of the node.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # Slurm 22.05 and newer: srun does not inherit --cpus-per-task of the batch script (srun(1)).
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
}

set_container() { # set_container [SCRIPT …]: CONTAINER, how a command is run in the image
    local runtime
    runtime=$(command -v apptainer || command -v singularity) ||
        fail "no apptainer or singularity in PATH" "load the module in scripts/sites/$SITE.sh, or run \`make setup\`"
    [[ -r $IMAGE ]] || fail "no image $IMAGE" "run \`make image\` or \`make pull IMAGE_URI=…\`"
    # The real working directory, not a symbolic link to it: else the process starts in $HOME.
    local here
    here=$(pwd -P)
    CONTAINER=("$runtime" exec --bind "$here" --pwd "$here")
    # The script may lie elsewhere; `-m MODULE` and `-c CODE` name no file.
    if [[ -n ${1:-} && $1 != -* ]]; then
        [[ -r $1 ]] || fail "no script $1" "make launch SCRIPT=FILE"
        CONTAINER+=(--bind "$(cd "$(dirname "$1")" && pwd -P)")
    fi
    # Node-local scratch that the batch system made for this job.
    if [[ -d ${TMPDIR:-} ]]; then CONTAINER+=(--bind "$TMPDIR"); fi
    # --nv without a driver binds host libraries in and says nothing.
    if has_nvidia_driver; then CONTAINER+=(--nv); fi
    if [[ -n ${BINDS:-} ]]; then CONTAINER+=(--bind "$BINDS"); fi
    CONTAINER+=("$IMAGE")
}

has_nvidia_driver() { [[ -e /dev/nvidiactl ]] || [[ -e /proc/driver/nvidia/version ]]; }

choose_mpi() { # MPI: pmix (srun starts the ranks) or mpirun (of the host)
    if [[ -z ${MPI:-} ]]; then
        if [[ -n ${SLURM_JOB_ID:-} ]] && srun --mpi=list 2>&1 | grep -w pmix > /dev/null; then # not -q: pipefail
            MPI=pmix reason="srun --mpi=list has pmix"
        elif command -v mpirun > /dev/null; then
            MPI=mpirun reason="srun has no pmix; mpirun of the host is $(command -v mpirun)"
        else
            fail "neither \`srun --mpi=pmix\` nor a host mpirun" "load an Open MPI module in scripts/sites/$SITE.sh"
        fi
    fi
    case $MPI in
    pmix | mpirun) echo "MPI ranks are started by $MPI (${reason:-MPI=$MPI is set})" ;;
    *) fail "MPI=$MPI is unknown" "MPI=pmix or MPI=mpirun" ;;
    esac
}

prepare_job() { # prepare_job [SCRIPT …]
    load_site
    clean_environment
    set_container "$@"
    echo "job ${SLURM_JOB_ID:-none} on ${SLURM_JOB_NODELIST:-$(hostname)}, image $IMAGE, site $SITE"
}
