# shellcheck shell=bash
# The two-node test cluster of tests/slurm: partition gpu, nodes n1 and n2, root's Slurm.
export SBATCH_PARTITION=gpu
