#!/bin/bash
#SBATCH --job-name=sorl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@1800 # has to cover a step, an evaluation and a checkpoint
#SBATCH --requeue
#SBATCH --output=%x-%j.out
# Two machines of 8 GPUs under Slurm: change RUN, RETRIEVER, the environment and what your cluster asks for, then
#   sbatch configs/cluster/slurm.sh
# It resumes when it finds a checkpoint, so it can be submitted again, or requeued. Half an hour before its time is up
# it finishes the step in progress, saves and ends. Tests run it with stand-ins for a cluster's commands; no cluster
# has.
set -euo pipefail

RUN=/shared/runs/nq_so_ppo_2nodes
RETRIEVER=http://retriever:8301/retrieve
# shellcheck source=/dev/null
source /shared/envs/sorl/bin/activate
export RAY_process_group_cleanup_enabled=true # inherited by all workers, as are the following
# export NCCL_SOCKET_IFNAME=... NCCL_IB_HCA=... HF_HOME=/shared/hf

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # this script runs there
# Its address on the way to the last node. Many machines resolve their own name to 127.0.1.1, which no other node
# reaches.
address=$(python -c '
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect((sys.argv[1], 6379))
    print(sock.getsockname()[0])' "${nodes[-1]}")

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port=6379 --num-gpus=8 \
    --num-cpus="$SLURM_CPUS_PER_TASK" --block &
sleep 20
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --address="$address:6379" --num-gpus=8 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
done
export RAY_ADDRESS=$address:6379
python - "$((8 * ${#nodes[@]}))" <<'PYTHON'
import sys, time
import ray

ray.init()
for _ in range(60):
    if ray.cluster_resources().get("GPU", 0) >= int(sys.argv[1]):
        break
    time.sleep(5)
else:
    sys.exit(f"of {sys.argv[1]} GPUs Ray has {ray.cluster_resources().get('GPU', 0):.0f}")
PYTHON

if compgen -G "$RUN/checkpoints/step_*" > /dev/null; then
    sorl-train --resume --run_dir "$RUN" &
else
    sorl-train --config paper/nq_so_ppo_2nodes --search.url "$RETRIEVER" --run_dir "$RUN" --overwrite &
fi
run=$!
trap 'kill -TERM "$run"' TERM # finish the step, save, end
status=0
wait "$run" || status=$?
while kill -0 "$run" 2> /dev/null; do # the trap ended the first wait
    status=0
    wait "$run" || status=$?
done
ray stop
exit "$status"
