#!/usr/bin/env bash
# Follows what the launched command prints on all hosts, each line headed by its slice and worker.
#
#   logs.sh --name my-tpu --zone us-west4-a [--worker 3]
#
# It starts with the last 200 lines and ends with the command; Ctrl-C leaves the command running.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
read_settings "name zone project slices worker workers" "$@"

hosts_of() { # NODE: sets HOSTS to the numbers of its hosts
  local count=$WORKERS host ask
  if [ "$WORKER" != all ]; then
    HOSTS=("$WORKER")
    return
  fi
  ask=(gcloud compute tpus tpu-vm describe "$1" "${PLACE[@]}" '--format=value(networkEndpoints.len())')
  if [ -z "$count" ] && [ -n "$DRY_RUN" ]; then
    quoted "${ask[@]}"
    echo "# the next line once for every host it counts; --workers N says how many" >&2
    count=1
  elif [ -z "$count" ]; then
    count=$("${ask[@]}") || stop "failed: $(quoted "${ask[@]}")" "does it exist? create.sh says so"
  fi
  HOSTS=()
  for ((host = 0; host < count; host++)); do HOSTS+=("$host"); done
}

follow() { # HEAD WORD...
  local head=$1 line code=0
  shift
  "$@" 2>"$SCRATCH/${head// /-}" </dev/null | while IFS= read -r line || [ -n "$line" ]; do
    printf '[%s] %s\n' "$head" "$line"
  done || code=$?
  [ "$code" = 0 ] && return
  sed "s/^/[$head] /" "$SCRATCH/${head// /-}" >&2
  say "[$head] failed with exit status $code: $(quoted "$@")"
  return 1
}

chosen=$WORKER
set -m # a process group for each, so that all of it can be ended
jobs=() failed=""
trap 'for job in ${jobs[@]+"${jobs[@]}"}; do kill -- "-$job" 2>/dev/null || true; done
  rm -rf "$SCRATCH"' EXIT
trap 'exit 130' INT TERM
for slice in "${!NODES[@]}"; do
  hosts_of "${NODES[slice]}"
  for host in "${HOSTS[@]}"; do
    WORKER=$host
    ssh_line "$slice" "${NODES[slice]}" bash jaxpost/on_worker.sh follow
    if [ -n "$DRY_RUN" ]; then
      quoted "${LINE[@]}"
    else
      follow "slice $slice worker $host" "${LINE[@]}" &
      jobs+=($!)
    fi
  done
  WORKER=$chosen
done
for job in ${jobs[@]+"${jobs[@]}"}; do
  wait "$job" || failed=yes
done
jobs=()
[ -z "$failed" ] || stop "the log of some host broke off, as said above" \
  "the same command again takes it up; create.sh says whether the TPU still stands"
