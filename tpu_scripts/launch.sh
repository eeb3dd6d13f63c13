#!/usr/bin/env bash
# Starts a command on every host of a TPU, in the background; logs.sh follows it.
#
#   launch.sh --name my-tpu --zone us-west4-a -- jaxpost train my_run.yaml steps=500
#   launch.sh --name my-tpu --zone us-west4-a --stop     a run saves, and can go on
#
# It runs in ~/jaxpost, and outlives this connection. With --bucket gs://..., the folder runs/ there
# (so: run=runs/...) comes from gs://.../my-tpu first, and goes back every two minutes and at the end.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
STOP=
read_settings "name zone project slices worker bucket stop COMMAND" "$@"

if [ -n "$STOP" ]; then
  [ ${#COMMAND[@]} = 0 ] || wrong "either --stop or a command"
  on_slices "the same command again asks again" ssh_line bash jaxpost/on_worker.sh stop
  exit
fi
[ ${#COMMAND[@]} != 0 ] || wrong "say what to run: ... -- jaxpost train my_run.yaml"
on_slices "setup.sh must have run; the same command again starts it where it is not running yet" \
  ssh_line bash jaxpost/on_worker.sh start "${RUN_BUCKET:+$RUN_BUCKET/$TPU_NAME}" "${COMMAND[@]}"
