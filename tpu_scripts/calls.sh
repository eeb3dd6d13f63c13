# shellcheck shell=bash disable=SC2034 # STATE is for the scripts that source this
# Running commands, or printing them; for the scripts beside it, which source it.

SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

stop() { # WHAT_HAPPENED WAY_OUT
  printf '%s: %s\n  %s\n' "${0##*/}" "$1" "$2" >&2
  exit 1
}

say() { [ -n "$DRY_RUN" ] || printf '%s\n' "$*" >&2; }

quoted() { # WORD...: one line that a shell reads as these words
  local word line="" quote="'" escaped="'\\''"
  for word; do
    case $word in
      *[\"\$\`\\!]*) word="'${word//$quote/$escaped}'" ;;
      *"'"*) word="\"$word\"" ;;
      '' | *[!A-Za-z0-9_./:=@%+,-]*) word="'$word'" ;;
    esac
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

call() { # WAY_OUT WORD...: runs the command, or prints it
  local way_out=$1 code
  shift
  if [ -n "$DRY_RUN" ]; then
    quoted "$@"
    return
  fi
  "$@" && return
  code=$?
  stop "failed with exit status $code: $(quoted "$@")" "$way_out"
}

# Sets STATE to absent, pending, ready or gone, and SAID to gcloud's own word for it.
look() { # ASSUMED_IN_A_DRY_RUN
  local command tries=0
  if [ -n "$QUEUED" ]; then
    command=(queued-resources describe "$TPU_NAME" "${PLACE[@]}" '--format=value(state.state)')
  else
    command=(tpu-vm describe "$TPU_NAME" "${PLACE[@]}" '--format=value(state)')
  fi
  command=(gcloud compute tpus "${command[@]}")
  if [ -n "$DRY_RUN" ]; then
    quoted "${command[@]}"
    SAID=$1 STATE=$1
    return
  fi
  until SAID=$("${command[@]}" 2>"$SCRATCH/errors"); do
    if grep -q NOT_FOUND "$SCRATCH/errors"; then
      SAID=NOT_FOUND
      break
    fi
    tries=$((tries + 1))
    [ "$tries" -lt 5 ] || stop "five times in a row failed: $(quoted "${command[@]}")
$(cat "$SCRATCH/errors")" "put right what gcloud says; the same command then goes on"
    sleep "$POLL_SECONDS"
  done
  case $SAID in
    NOT_FOUND) STATE=absent ;;
    READY | ACTIVE) STATE=ready ;;
    PREEMPTED | TERMINATED | STOPPED | SUSPENDED | FAILED | HIDDEN | UNKNOWN) STATE=gone ;;
    *) STATE=pending ;;
  esac
}

ssh_line() { # SLICE NODE WORD...: sets LINE to a command that runs the words there
  local slice=$1 node=$2
  shift 2
  LINE=(gcloud compute tpus tpu-vm ssh "$node" "${PLACE[@]}" "--worker=$WORKER"
    "--command=SLICE=$slice $(quoted "$@")")
}

scp_line() { # SLICE NODE FILE...: sets LINE to a command that copies the files there
  local node=$2
  shift 2
  LINE=(gcloud compute tpus tpu-vm scp --recurse "$@" "$node:jaxpost/" "${PLACE[@]}"
    "--worker=$WORKER")
}

# On all slices at once; where some fail, says which slice and worker, and stops.
on_slices() { # WAY_OUT ssh_line|scp_line WORD...
  local way_out=$1 make_line=$2 slice lines=() jobs=() report="" code
  shift 2
  for slice in "${!NODES[@]}"; do
    "$make_line" "$slice" "${NODES[slice]}" "$@"
    lines[slice]=$(quoted "${LINE[@]}")
    if [ -n "$DRY_RUN" ]; then
      printf '%s\n' "${lines[slice]}"
      continue
    fi
    { { "${LINE[@]}" 2>&1 1>&3 | tee "$SCRATCH/$slice" >&2; } 3>&1; } &
    jobs[slice]=$!
  done
  for slice in "${!jobs[@]}"; do
    code=0
    wait "${jobs[slice]}" || code=$?
    [ "$code" = 0 ] || report+="
slice $slice: $(failed_workers "$slice" "$code"), of: ${lines[slice]}"
  done
  [ -z "$report" ] || stop "a command failed${report}" "$way_out"
}

# gcloud tries ten times to reach a host, and then names it no more.
failed_workers() { # SLICE EXIT_STATUS
  local named
  named=$(awk '
    match($0, /worker [0-9]+ failed with exit status [0-9]+/) { print substr($0, RSTART, RLENGTH) }
    /Attempting to connect to worker/ && ++tried[$NF] == 10 {
      sub(/[.]*$/, ""); print "worker " $NF " could not be reached"
    }' "$SCRATCH/$1" | sort -u | paste -sd, - | sed 's/,/, /g')
  [ "$WORKER" = all ] || named="worker $WORKER failed with exit status $2"
  printf '%s' "${named:-exit status $2}"
}
