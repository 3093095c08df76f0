#!/usr/bin/env bash
# Runs a sweep on several Slurm nodes: one Ray node on each, the driver on the first.
# Never run on a Slurm cluster with GPUs: its steps were run on one CPU node, with a stand-in for
# `ray`. See docs/clusters.md.
#
#   sbatch --nodes=2 --gpus-per-node=8 sweeps/launch/slurm.sh +exp=a2a_scaling cluster=cx7
#   sbatch --nodes=2 --gpus-per-node=8 --export=ALL,EP_RAY_IMAGE=/images/ep_ray.sqsh \
#     sweeps/launch/slurm.sh +exp=a2a_scaling cluster=cx7
#
# Everything after the script goes to `python -m ep_ray.sweep`. Read from the environment:
#   EP_RAY_PYTHON  Python of the venv on every node; default: .venv/bin/python of the checkout,
#                  or python3 inside a container
#   EP_RAY_IMAGE   container image for enroot/pyxis; default: none
#   EP_RAY_HEAD_IP address of the first node; default: what its hostname resolves to there
#   EP_RAY_PORT    port of Ray's head; default 6379
#SBATCH --job-name=ep-ray
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --output=ep-ray-%j.log
set -euo pipefail

checkout=${SLURM_SUBMIT_DIR:?submit this script with sbatch, from the checkout}
nodes=${SLURM_JOB_NUM_NODES:?submit this script with sbatch}
mapfile -t names < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
head_name=${names[0]}
head_ip=${EP_RAY_HEAD_IP:-$(srun --nodes=1 --ntasks=1 --nodelist="$head_name" hostname --ip-address)}
head_ip=${head_ip%% *}
if ((nodes > 1)) && [[ $head_ip == 127.* ]]; then
  echo "ep-ray: $head_name calls itself $head_ip, which the other nodes cannot reach: set" \
    "EP_RAY_HEAD_IP to its address on the cluster's network" >&2
  exit 1
fi
address=$head_ip:${EP_RAY_PORT:-6379}

container=()
default_python=$checkout/.venv/bin/python
if [[ -n ${EP_RAY_IMAGE:-} ]]; then
  container=(
    "--container-image=$EP_RAY_IMAGE"
    "--container-mounts=$checkout:$checkout"
    "--container-workdir=$checkout"
  )
  default_python=python3
fi
python=${EP_RAY_PYTHON:-$default_python}
export PATH="${python%/*}:$PATH" # symmetric-run starts `ray` by its name

# A raylet hands its environment to every rank; RDMA locks its buffers in memory.
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
ulimit -l unlimited 2>/dev/null || echo "ep-ray: locked memory stays limited to $(ulimit -l) KiB" >&2

# symmetric-run (Ray 2.60) exits with 0 when Ray does not start, so the sweep leaves a mark.
mark=$checkout/.ep-ray-$SLURM_JOB_ID.started
trap 'rm -f "$mark"' EXIT

# Engines need ports 18000 to 19999 (docs/clusters.md), which Ray's workers would take.
# shellcheck disable=SC2016  # $0 and $@ are the inner shell's
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  "${container[@]}" \
  ray symmetric-run --address "$address" --min-nodes "$nodes" \
  --min-worker-port 20000 --max-worker-port 29999 \
  -- bash -c 'touch "$0" && exec "$@"' "$mark" \
  "$python" -m ep_ray.sweep cluster=attached "$@"

if [[ ! -e $mark ]]; then
  echo "ep-ray: Ray did not start on $nodes nodes at $address, so nothing was measured" >&2
  exit 1
fi
