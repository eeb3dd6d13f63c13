#!/usr/bin/env bash
# Brings a file or folder of ~/jaxpost here, into a folder (default: the one you are in).
#
#   fetch.sh --name my-tpu --zone us-west4-a runs/my_run [results]
#   fetch.sh --name my-tpu --bucket gs://my-bucket --from-bucket runs/my_run [results]
#
# The first host of the first slice has it, unless --worker says another; log.txt is what the command
# printed. --from-bucket takes it from where a run with --bucket is kept, also when the TPU is gone.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
FROM_BUCKET=
read_settings "name zone project slices worker bucket from-bucket FILE" "$@"

[ ${#FILES[@]} = 1 ] || [ ${#FILES[@]} = 2 ] || wrong "say what, and perhaps where to: runs/my_run ."
what=${FILES[0]%/} to=${FILES[1]:-.}
call "choose another folder" mkdir -p "$to"
if [ -n "$FROM_BUCKET" ]; then
  [ -n "$RUN_BUCKET" ] || wrong "--from-bucket wants --bucket gs://..."
  [[ $what == runs/?* ]] || wrong "the bucket holds what is under runs/, not $what"
  call "choose another folder" mkdir -p "$to/${what##*/}"
  call "is it there? gcloud storage ls $RUN_BUCKET/$TPU_NAME/" gcloud storage rsync --recursive \
    "$RUN_BUCKET/$TPU_NAME/${what#runs/}" "$to/${what##*/}"
else
  [ "$WORKER" != all ] || WORKER=0
  call "is it there? logs.sh shows what the run says; where the TPU is gone, --from-bucket" \
    gcloud compute tpus tpu-vm scp --recurse "${NODES[0]}:jaxpost/$what" "$to" "${PLACE[@]}" \
    "--worker=$WORKER"
fi
