#!/usr/bin/env bash
# Creates a TPU, sets it up and launches a command; does so again whenever it is taken away; ends
# when the command has ended well.
#
#   run_until_done.sh --name my-tpu --zone us-west4-a --type v6e-8 --spot --queued \
#     --bucket gs://my-bucket my_run.yaml my_data.jsonl -- jaxpost train my_run.yaml run=runs/my_run
#
# The command has to go on where it left off when it is run again, as `jaxpost train` does. A TPU that
# is taken away loses its disk: --bucket keeps runs/ (launch.sh says how). A command that fails stops
# this; exit code 75 (stopped, can go on) and ends by a signal do not. The TPU is left standing at the
# end: fetch.sh and delete.sh are yours. Stopping this script stops nothing else; started again, it
# goes on watching.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
read_settings "name zone project type runtime slices spot queued bucket package extras poll FILE \
COMMAND" "$@"
[ ${#COMMAND[@]} != 0 ] || wrong "say what to run: ... -- jaxpost train my_run.yaml run=runs/my_run"
[ -n "$RUN_BUCKET" ] || wrong "without --bucket gs://... a TPU that is taken away takes the run along"

is_up() { # makes a TPU, and has it set up and running the command
  bash "$HERE/create.sh" || return 1
  created=yes
  bash "$HERE/setup.sh" ${FILES[@]+"${FILES[@]}"} && relaunch
}

relaunch() { bash "$HERE/launch.sh" -- "${COMMAND[@]}"; }

# Sets RUN to how the command is; of several hosts, to what decides.
ask() {
  local status="[ ! -e jaxpost/on_worker.sh ] || bash jaxpost/on_worker.sh status"
  if [ -n "$DRY_RUN" ]; then
    on_slices "" ssh_line sh -c "$status"
    RUN="done"
    return
  fi
  if ! (on_slices "the TPU may be gone" ssh_line sh -c "$status") >"$SCRATCH/said"; then
    RUN=unknown
    return
  fi
  RUN=$(sed -n 's/^slice [0-9]* worker [0-9]*: //p' "$SCRATCH/said" | awk '
    /^exited/ && $2 == 75 || /^interrupted/ { stopped = $0; next }
    /^exited/ && $2 >= 128 { killed = $0; next }
    /^exited/ && $2 != 0 { failed = $0; next }
    { seen[$1] = 1 }
    END {
      if (failed) print "failed: " failed
      else if ("idle" in seen) print "idle"
      else if (killed) print "killed: " killed
      else if (stopped) print "stopped: " stopped
      else if ("running" in seen) print "running"
      else if ("exited" in seen) print "done"
      else print "idle"
    }')
}

created="" troubles=0 killed=0
again() { # LIMIT WHAT_HAPPENED: counts what goes wrong in a row while the TPU stands
  troubles=$((troubles + 1))
  [ "$troubles" -lt "$1" ] || stop "$2, $1 times in a row" "what failed stands above; put it right, \
and the same command goes on"
  say "$2; trying again in $POLL_SECONDS s"
  sleep "$POLL_SECONDS"
}

while :; do
  look absent
  case $STATE in
    pending) sleep "$POLL_SECONDS" ;;
    absent | gone)
      [ "$SAID" != STOPPED ] || stop "$TPU_NAME was stopped by hand" \
        "start it: $(quoted gcloud compute tpus tpu-vm start "$TPU_NAME" "${PLACE[@]}")"
      if [ "$STATE" = gone ]; then
        created=yes
        say "$TPU_NAME is $SAID: making it anew"
        YES=1 bash "$HERE/delete.sh" || { again 5 "it was not deleted"; continue; }
      fi
      if is_up; then
        troubles=0
      elif [ -z "$created" ]; then
        stop "the TPU was not created" "what failed stands above"
      else
        say "it is not up; looking again in $POLL_SECONDS s"
        sleep "$POLL_SECONDS"
      fi
      [ -z "$DRY_RUN" ] || { look ready; ask; break; }
      ;;
    ready)
      created=yes
      ask
      case $RUN in
        done) break ;;
        running)
          troubles=0
          sleep "$POLL_SECONDS"
          ;;
        idle)
          is_up || true
          again 5 "it was not running"
          ;;
        stopped* | killed*)
          [[ $RUN != killed* ]] || killed=$((killed + 1))
          [ "$killed" -lt 5 ] || stop "the command was killed five times ($RUN)" \
            "137 may be lack of memory; logs.sh shows what it said"
          bash "$HERE/launch.sh" --stop && relaunch || true
          again 5 "it was launched again ($RUN)"
          ;;
        unknown) again 20 "it could not be asked how the command is" ;;
        *) stop "the command failed ($RUN)" "logs.sh shows what it said; put it right, then go on" ;;
      esac
      ;;
  esac
done
say "done; fetch.sh brings the results, delete.sh ends the TPU"
