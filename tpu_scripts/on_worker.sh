#!/usr/bin/env bash
# What happens on a host of a TPU; setup.sh copies it there, into ~/jaxpost, where all of it stays.
#
#   on_worker.sh install SPEC               makes venv/ and installs SPEC with pip
#   on_worker.sh start BUCKET COMMAND...    in the background; BUCKET is gs://... or empty
#   on_worker.sh status | follow | stop     the command's state; what it prints; SIGTERM
#
# SLICE in the environment is the number of this host's slice. The first host of the first slice
# keeps the folder runs/ in BUCKET: what is there comes first, and goes back while the command runs.
set -euo pipefail
cd "$(dirname "$0")"
WORKER=${HOSTNAME##*-w-} # t1v-n-1234abcd-w-3
[[ $WORKER =~ ^[0-9]+$ ]] || WORKER=0
ME="slice ${SLICE:-0} worker $WORKER"

fail() { # MESSAGE
  printf '%s: %s\n' "$ME" "$1" >&2
  exit 1
}

running() { ! flock --nonblock running.lock true; }

state() {
  if running; then
    echo running
  elif [ -e exit_code.txt ]; then
    echo "exited $(cat exit_code.txt)"
  elif [ -e command.txt ]; then
    echo interrupted # the host went down under it
  else
    echo idle
  fi
}

install() { # SPEC
  local python
  for python in python3.13 python3.12 python3.11 python3; do
    [ -x venv/bin/python ] && break
    "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    "$python" -m venv venv
  done
  if [ ! -x venv/bin/python ]; then # Ubuntu 22.04 has Python 3.10
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --clear --python 3.12 --seed venv
  fi
  venv/bin/python -m pip uninstall --quiet --yes jaxpost # the same version may hold other code
  venv/bin/python -m pip install --quiet "$1"
  printf '%s: %s\n' "$ME" "$(venv/bin/jaxpost --version)"
}

# Writes before it reads: a bucket that is not there or not open to us shows now, not hours later.
pull() { # BUCKET
  [ -n "$1" ] && [ "$(cat bucket.txt 2>/dev/null)" != "$1" ] || return 0
  mkdir -p runs
  echo "$ME" | gcloud storage cp --quiet - "$1/launched/${ME// /-}.txt" ||
    fail "$1 cannot be written; is its name right, and has the TPU's service account the role \
Storage Object Admin there?"
  gcloud storage rsync --quiet --recursive --no-clobber "$1" runs || fail "$1 could not be read"
  echo "$1" >bucket.txt
}

# Nothing old goes before all that is new is there. runs.copy holds still meanwhile: links, no bytes.
push() { # BUCKET
  local copy=(gcloud storage rsync --quiet --recursive '--exclude=.*lock\.json$')
  exec 9>push.lock
  flock 9
  rm -rf runs.copy
  cp -al runs runs.copy && "${copy[@]}" runs.copy "$1" &&
    "${copy[@]}" --delete-unmatched-destination-objects runs.copy "$1" && rm -rf runs.copy
}

run() { # BUCKET COMMAND...
  local bucket=$1 child="" syncer="" code=0
  shift
  [ "$ME" = "slice 0 worker 0" ] || bucket=""
  mkdir -p runs
  export PATH="$PWD/venv/bin:$PATH" JAXPOST_CACHE_DIR="${JAXPOST_CACHE_DIR:-$PWD/runs/compiled}"
  trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM
  "$@" &
  child=$!
  if [ -n "$bucket" ]; then
    while sleep "${SYNC_SECONDS:-120}"; do (push "$bucket") || true; done 8>&- &
    syncer=$!
  fi
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  wait "$child" || code=$?
  if [ -n "$bucket" ]; then
    kill "$syncer" || true
    (push "$bucket") || echo "$ME: runs/ did not all get to $bucket"
  fi
  echo "$code" >exit_code.txt
}

start() { # BUCKET COMMAND...
  local wanted
  wanted=$(printf '%q ' "$@")
  exec 8>running.lock
  if ! flock --nonblock 8; then
    [ "$wanted" = "$(cat command.txt)" ] || fail "another command is running: $(cat command.txt)
launch.sh --stop ends it; then launch again"
    echo "$ME: running already"
    return
  fi
  pull "$1"
  rm -f exit_code.txt
  printf '%s' "$wanted" >command.txt
  setsid bash on_worker.sh run "$@" >>log.txt 2>&1 </dev/null &
  echo $! >pid.txt
  echo "$ME: started"
}

follow() {
  [ -e log.txt ] || fail "nothing was launched here; launch.sh does"
  if running; then
    tail --lines=200 --follow=name --pid="$(cat pid.txt)" log.txt
  else
    tail --lines=200 log.txt
  fi
  state
}

stop() {
  running && kill -TERM "$(cat pid.txt)"
  while running; do sleep 0.2; done
  echo "$ME: $(state)"
}

case ${1:-} in
  install | start | run | follow) "$@" ;;
  status) echo "$ME: $(state)" ;;
  stop) stop ;;
  *) fail "it does install, start, status, follow and stop, not '${1:-}'" ;;
esac
