#!/bin/bash
#SBATCH --job-name=apertus --ntasks-per-node=1 --exclusive
# A run on a Ray cluster of its own, in one allocation of Slurm, whose nodes see the folder of submission, the checkout, this environment
# (`apertus` and `ray` on PATH) and the store. The profile is a copy of ray.yaml without `address`.
#
#     sbatch --nodes=4 --time=24:00:00 ray-slurm.sh SPEC --profile my-cluster.yaml --store URL
#
# At its end Ray ends every process of Ray that its user has on these nodes: they are for this job alone.
set -eu
ADDRESS=$(hostname --all-ip-addresses | cut -d ' ' -f 1):$((20000 + SLURM_JOB_ID % 10000))
FOLDER=/tmp/ray-$SLURM_JOB_ID
CODE=$(mktemp "$PWD/.apertus-$SLURM_JOB_ID-XXXXXX")
trap 'rm -f "$CODE"' EXIT
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export FOLDER CODE RAY_AUTH_TOKEN RAY_ADDRESS=$ADDRESS
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 # seconds; 30 by default
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_kill_child_processes_on_worker_exit=0 RAY_worker_niceness=0

on_head() {
    apertus run "$@"
    echo $? > "$CODE" # Ray's own code is 0 where it does not start
}

# The head is on the first node. When its task has ended, srun ends the others, which would wait for a minute; one that ends before waits.
on_node() {
    HEAD=
    [ "$SLURM_PROCID" != 0 ] || HEAD="--include-dashboard false --temp-dir $FOLDER"
    ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_NNODES" --num-cpus "$SLURM_CPUS_ON_NODE" $HEAD \
        --object-store-memory 100000000 -- bash -c 'on_head "$@"' on_head "$@"
    rm -rf "$FOLDER"
    [ "$SLURM_PROCID" = 0 ] || exec sleep infinity
}

export -f on_head on_node
srun --wait=2 --cpus-per-task="$SLURM_CPUS_ON_NODE" bash -c 'on_node "$@"' on_node "$@" || true
exit "$(grep . "$CODE" || echo 1)"
