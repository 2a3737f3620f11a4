#!/bin/bash
#SBATCH --job-name=apertus --ntasks-per-node=1 --exclusive
# A run on a Ray cluster of its own, in one allocation of Slurm, whose nodes see the checkout, this environment (`apertus` and `ray` on
# PATH) and the store. The profile is a copy of ray.yaml without `address`.
#
#     sbatch --nodes=4 --time=24:00:00 ray-slurm.sh SPEC --profile my-cluster.yaml --store URL
#
# At its end Ray ends every process of Ray that its user has on these nodes: have them for this job alone.
set -eu
address=$(hostname --all-ip-addresses | cut -d ' ' -f 1):$((20000 + SLURM_JOB_ID % 10000))
export APERTUS_RAY=$address RAY_USAGE_STATS_ENABLED=0 RAY_kill_child_processes_on_worker_exit=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export APERTUS_RAY_CODE=$(mktemp "$PWD/.apertus-$SLURM_JOB_ID-XXXXXX")
trap 'rm -f "$APERTUS_RAY_CODE"' EXIT

# Its first task is the head. When that has ended, srun ends the others, which would wait for a minute; one that ends before waits.
srun --wait=2 --cpus-per-task="$SLURM_CPUS_ON_NODE" --cpu-bind=none bash -c '
    ray symmetric-run --address "$APERTUS_RAY" --min-nodes "$SLURM_NNODES" --num-cpus "$SLURM_CPUS_ON_NODE" \
        --object-store-memory 100000000 --temp-dir "/tmp/ray-$SLURM_JOB_ID" \
        -- env RAY_ADDRESS="$APERTUS_RAY" apertus run "$@"
    code=$?
    rm -rf "/tmp/ray-$SLURM_JOB_ID"
    [ "$SLURM_PROCID" = 0 ] || exec sleep infinity
    echo "$code" > "$APERTUS_RAY_CODE"' apertus "$@" || true
exit "$(cat "$APERTUS_RAY_CODE" | grep . || echo 1)"
