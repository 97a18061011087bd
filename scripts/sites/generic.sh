# shellcheck shell=bash
# A site that needs nothing: Slurm's own defaults, singularity or apptainer in PATH.
# Copy this file to NAME.sh for your cluster and launch with SITE=NAME. Slurm reads defaults from
# its input variables (sbatch(1), "INPUT ENVIRONMENT VARIABLES"), for example:
#   export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=project42
# Modules and binds go into a function that runs on the compute node:
#   site_setup() { module load apptainer; export BINDS=/scratch; }
