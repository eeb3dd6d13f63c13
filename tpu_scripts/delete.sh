#!/usr/bin/env bash
# Deletes a TPU, its disk and, where it came through a queued resource, that too; it asks first.
#
#   delete.sh --name my-tpu --zone us-west4-a [--queued] [--slices 2] [--yes]
#
# What is not there is fine. A run that is to go on elsewhere: launch.sh --stop first.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
read_settings "name zone project slices queued poll yes" "$@"

look ready
if [ "$STATE" = absent ]; then
  say "there is no $TPU_NAME; nothing to delete"
  exit
fi
if [ -z "$YES" ] && [ -z "$DRY_RUN" ]; then
  printf '%s is %s. Delete it, with all that is on its disk? Type its name: ' "$TPU_NAME" "$SAID" >&2
  read -r answer || answer=""
  [ "$answer" = "$TPU_NAME" ] || stop "not deleted" "type its name when asked, or give --yes"
fi
if [ -n "$QUEUED" ]; then
  old=(queued-resources delete "$TPU_NAME" "${PLACE[@]}" --force)
else
  old=(tpu-vm delete "$TPU_NAME" "${PLACE[@]}")
fi
call "gcloud says why above; one that came through a queued resource wants --queued" \
  gcloud compute tpus "${old[@]}"
say "deleted $TPU_NAME"
