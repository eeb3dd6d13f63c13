#!/usr/bin/env bash
# TPUs in Google Kubernetes Engine, through xpk (pip install xpk; kubectl for logs).
#
#   gke.sh create --name my-cluster --zone us-west4-a --type v5litepod-8 [--spot] [--slices 2]
#   gke.sh launch ... --workload my-run [FILE...] -- jaxpost train my_run.yaml run=/runs/my_run
#   gke.sh status | logs | stop ... --workload my-run
#   gke.sh delete ...
#
# --name is the cluster's. --bucket gs://my-bucket at create mounts that bucket (gcsfuse) at /runs in
# every workload. launch sends this checkout and FILEs along, and starts the command again after
# preemption and after exit code 75, --restarts times (default 20).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
[ $# != 0 ] || set -- --help
verb=$1 known="name zone project"
case $verb in
  create) known+=" type slices spot bucket" ;;
  launch) known+=" workload type slices extras restarts FILE COMMAND" ;;
  status | logs | stop) known+=" workload" ;;
  delete) known+=" yes" ;;
  -h | --help) known+=" type slices spot bucket workload extras restarts yes" ;;
  *) wrong "gke.sh does create, launch, status, logs, stop and delete, not '$verb'" ;;
esac
[[ $verb == -* ]] || shift
read_settings "$known" "$@"

where=()
[ -z "$ZONE" ] || where+=("--zone=$ZONE")
[ -z "$PROJECT_ID" ] || where+=("--project=$PROJECT_ID")
xpk_call() { # WAY_OUT WORD...
  local way_out=$1
  shift
  call "$way_out" xpk "$@" "--cluster=$TPU_NAME" ${where[@]+"${where[@]}"}
}
case $verb in
  create | launch) [ -n "$ACCELERATOR_TYPE" ] || wrong "say which TPU: --type v5litepod-8, for one" ;;
esac
case $verb in
  launch | status | logs | stop)
    [[ $WORKLOAD =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
      wrong "name the run: --workload NAME, of small letters, digits and hyphens" ;;
esac

case $verb in
  create)
    capacity=--on-demand
    [ -z "$SPOT" ] || capacity=--spot
    new=("--tpu-type=$ACCELERATOR_TYPE" "--num-slices=$NUM_SLICES" "$capacity")
    [ -z "$RUN_BUCKET" ] || new+=(--enable-gcsfuse-csi-driver)
    xpk_call "xpk says why above; the same command again goes on" cluster create "${new[@]}"
    [ -z "$RUN_BUCKET" ] || xpk_call "the same command again goes on" storage attach jaxpost-runs \
      --type=gcsfuse "--bucket=${RUN_BUCKET#gs://}" --mount-point=/runs --readonly=false \
      --auto-mount=true
    ;;
  launch)
    [ ${#COMMAND[@]} != 0 ] || wrong "say what to run: ... -- jaxpost train my_run.yaml"
    [[ ${COMMAND[*]} != *$'\n'* ]] || wrong "no word of the command may have several lines"
    checkout=$(dirname "$HERE")
    image=$checkout/build/gke
    call "is the disk full?" rm -rf "$image"
    call "is the disk full?" mkdir -p "$image"
    call "is there such a file?" cp -R "$checkout"/{pyproject.toml,README.md,LICENSE,jaxpost} \
      ${FILES[@]+"${FILES[@]}"} "$image"
    # exec: xpk passes SIGTERM on to this process only.
    xpk_call "xpk says why above; a workload of that name may be there: gke.sh stop" \
      workload create "--workload=$WORKLOAD" "--tpu-type=$ACCELERATOR_TYPE" \
      "--num-slices=$NUM_SLICES" --base-docker-image=python:3.12 "--script-dir=$image" \
      "--max-restarts=$RESTARTS" --restart-on-exit-codes=75 \
      "--command=pip install --quiet '.[tpu${EXTRAS:+,$EXTRAS}]' && exec $(quoted "${COMMAND[@]}")"
    ;;
  status) xpk_call "see: xpk cluster list" workload list "--filter-by-job=$WORKLOAD" ;;
  logs)
    [ -n "$ZONE" ] || wrong "logs wants --zone"
    call "is the name right? xpk cluster list" gcloud container clusters get-credentials \
      "$TPU_NAME" "--location=${ZONE%-*}" ${PROJECT_ID:+"--project=$PROJECT_ID"}
    call "has it started? gke.sh status" kubectl logs --follow --prefix --max-log-requests=64 \
      --tail=200 "--selector=jobset.sigs.k8s.io/jobset-name=$WORKLOAD"
    ;;
  stop) xpk_call "see: gke.sh status" workload delete "--workload=$WORKLOAD" --force ;;
  delete)
    if [ -z "$YES" ] && [ -z "$DRY_RUN" ]; then
      printf 'Delete the cluster %s and all that runs in it? Type its name: ' "$TPU_NAME" >&2
      read -r answer || answer=""
      [ "$answer" = "$TPU_NAME" ] || stop "not deleted" "type its name when asked, or give --yes"
    fi
    xpk_call "xpk says why above" cluster delete --force
    ;;
esac
