#!/usr/bin/env bash
# Creates a TPU and waits until it is ready: on demand, --spot, or in line for it (--queued).
#
#   create.sh --name my-tpu --zone us-west4-a --type v5litepod-8 [--spot] [--queued] [--slices 2]
#
# What exists already is left as it is. Further flags of gcloud stand after --, as in
#   create.sh ... -- --network=my-network --service-account=me@my-project.iam.gserviceaccount.com
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
read_settings "name zone project type runtime slices spot queued poll COMMAND" "$@"

[ -n "$ACCELERATOR_TYPE" ] || wrong "say which TPU: --type v5litepod-8, for one"
case $ACCELERATOR_TYPE in
  tpu7x-* | v7x-*) stop "$ACCELERATOR_TYPE is not to be had as a TPU VM" "use gke.sh for it" ;;
  v5litepod-*) : "${RUNTIME_VERSION:=v2-alpha-tpuv5-lite}" ;;
  v5p-*) : "${RUNTIME_VERSION:=v2-alpha-tpuv5}" ;;
  v6e-*) : "${RUNTIME_VERSION:=v2-alpha-tpuv6e}" ;;
  v[234]-*) : "${RUNTIME_VERSION:=tpu-ubuntu2204-base}" ;;
  *) [ -n "$RUNTIME_VERSION" ] || wrong "no runtime is known for $ACCELERATOR_TYPE: --runtime" ;;
esac

new=("$TPU_NAME" "${PLACE[@]}" "--accelerator-type=$ACCELERATOR_TYPE")
if [ -n "$QUEUED" ]; then
  new=(queued-resources create "${new[@]}" "--runtime-version=$RUNTIME_VERSION")
  if [ "$NUM_SLICES" = 1 ]; then
    new+=("--node-id=$TPU_NAME")
  else
    new+=("--node-count=$NUM_SLICES" "--node-prefix=$TPU_NAME")
  fi
else
  new=(tpu-vm create "${new[@]}" "--version=$RUNTIME_VERSION")
fi
[ -z "$SPOT" ] || new+=(--spot)
new+=(${COMMAND[@]+"${COMMAND[@]}"})

look absent
case $STATE in
  ready) say "$TPU_NAME exists already, and is ready" ;;
  pending) say "$TPU_NAME exists already: $SAID" ;;
  gone) stop "$TPU_NAME exists, but is $SAID" "delete.sh first; run_until_done.sh does both" ;;
  absent) call "gcloud says why above; where there is none to be had, --queued waits in line, \
--spot or another --zone may have some" gcloud compute tpus "${new[@]}" ;;
esac

while [ "$STATE" != ready ]; do
  look ready
  case $STATE in
    pending)
      say "$TPU_NAME is $SAID; looking again in $POLL_SECONDS s (the same command goes on waiting)"
      sleep "$POLL_SECONDS"
      ;;
    gone | absent) stop "$TPU_NAME is $SAID" "look why with: gcloud compute tpus \
${new[0]} describe $TPU_NAME; then delete.sh, and create it again" ;;
  esac
done
say "$TPU_NAME is ready"
