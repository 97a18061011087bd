#!/usr/bin/env bash
# The main job, on this machine: the distributed examples inside the image on 4 local ranks, once
# under mpirun and once under torchrun. `make demo` builds the image first.
# shellcheck source=scripts/jobs/common.sh
source "$(dirname "$0")/jobs/common.sh"
prepare_job "$@"
examples=/opt/payload/examples

step() { echo; echo "== $*"; }

step "4 MPI ranks: mpirun -n 4 python distributed_learning_mpi.py"
"${CONTAINER[@]}" mpirun -n 4 --oversubscribe python -u $examples/distributed_learning_mpi.py --expect-world 4

step "4 ranks of torchrun: torchrun --nproc-per-node=4 distributed_learning_nccl.py"
"${CONTAINER[@]}" torchrun --standalone --nproc-per-node=4 $examples/distributed_learning_nccl.py --expect-world 4

step "done: 4 ranks summed the right numbers under mpirun and under torchrun, in $IMAGE"
echo "next: make shell; on a cluster: make launch JOB=mpi SCRIPT=payload/examples/distributed_learning_mpi.py NODES=2 TASKS=2"
