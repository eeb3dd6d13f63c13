# shellcheck shell=bash disable=SC2034 # read by the scripts that source this
# What flags and environment say, checked; for the scripts beside it, which source it.
#
#   --name NAME        TPU_NAME          what the TPU is called
#   --zone ZONE        ZONE              (default: gcloud's own setting)
#   --project PROJECT  PROJECT_ID        (default: gcloud's own setting)
#   --type TYPE        ACCELERATOR_TYPE  v5litepod-8 (or v5e-8), v5p-8, v6e-8 ...
#   --runtime VERSION  RUNTIME_VERSION   (default: the one of the type)
#   --slices N         NUM_SLICES        several slices always come through a queued resource
#   --spot             SPOT=1            cheaper, and may be taken away at any time
#   --queued           QUEUED=1          wait in line for it (a queued resource)
#   --bucket gs://...  RUN_BUCKET        where runs are kept beyond the TPU, under its name
#   --package SPEC     PACKAGE           for pip on the TPU (default: this checkout)
#   --extras a,b       EXTRAS            of jaxpost, besides `tpu`
#   --worker N         WORKER            one host of a slice (default: all)
#   --workers N        WORKERS           hosts of a slice (default: gcloud is asked)
#   --poll SECONDS     POLL_SECONDS      between two looks at a state (default 30)
#   --workload NAME    WORKLOAD          what a run is called in GKE
#   --restarts N       RESTARTS          of a run in GKE (default 20)
#   --yes              YES=1             do not ask
#   --dry-run          DRY_RUN=1         print every command and run none

wrong() { # MESSAGE: wrong usage
  printf '%s: %s\n(%s --help explains its flags)\n' "${0##*/}" "$1" "$0" >&2
  exit 2
}

usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  printf '\nsettings, as flags or in the environment:\n'
  local flag
  for flag in $1 dry-run; do
    sed -n "s/^#   --$flag /  --$flag /p" "$HERE/settings.sh"
  done
}

variable_of() { # FLAG
  case $1 in
    name) echo TPU_NAME ;;
    project) echo PROJECT_ID ;;
    type) echo ACCELERATOR_TYPE ;;
    runtime) echo RUNTIME_VERSION ;;
    slices) echo NUM_SLICES ;;
    bucket) echo RUN_BUCKET ;;
    poll) echo POLL_SECONDS ;;
    *) printf '%s' "$1" | tr 'a-z-' 'A-Z_' ;;
  esac
}

# Sets the variables, FILES (arguments without a flag) and COMMAND (what stands after --).
read_settings() { # "FLAG ... [FILE] [COMMAND]" ARGUMENT...
  local known=" $1 dry-run " flag value
  FILES=() COMMAND=()
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage "${known% dry-run }"; exit 0 ;;
      --)
        [[ $known == *' COMMAND '* ]] || wrong "it takes no command after --"
        shift
        COMMAND=("$@")
        break
        ;;
      --*)
        flag=${1#--} flag=${flag%%=*}
        [[ $flag =~ ^[a-z-]+$ && $known == *" $flag "* ]] || wrong "there is no --$flag here"
        case $flag in
          spot | queued | yes | dry-run | stop | from-bucket) value=1 ;;
          *)
            if [[ $1 != *=* ]]; then
              [ $# -gt 1 ] || wrong "--$flag wants a value"
              shift
            fi
            value=${1#--"$flag"=}
            [ -n "$value" ] || wrong "--$flag is empty"
            ;;
        esac
        printf -v "$(variable_of "$flag")" '%s' "$value"
        ;;
      -*) wrong "there is no $1 here" ;;
      *)
        [[ $known == *' FILE '* ]] || wrong "what is $1 for? It takes flags only"
        FILES+=("$1")
        ;;
    esac
    shift
  done
  check_settings
}

check_settings() {
  : "${TPU_NAME:=}" "${ZONE:=}" "${PROJECT_ID:=}" "${ACCELERATOR_TYPE:=}" "${RUNTIME_VERSION:=}"
  : "${NUM_SLICES:=1}" "${SPOT:=}" "${QUEUED:=}" "${RUN_BUCKET:=}" "${PACKAGE:=}" "${EXTRAS:=}"
  : "${WORKER:=all}" "${WORKERS:=}" "${POLL_SECONDS:=30}" "${YES:=}" "${DRY_RUN:=}"
  : "${WORKLOAD:=}" "${RESTARTS:=20}"
  [ -n "$TPU_NAME" ] || wrong "name it: --name NAME, or TPU_NAME in the environment"
  [[ $TPU_NAME =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
    wrong "'$TPU_NAME' is no name for it: small letters, digits and hyphens, a letter first"
  [[ $NUM_SLICES =~ ^[1-9][0-9]*$ ]] || wrong "--slices is '$NUM_SLICES', not a number from 1 on"
  [[ $POLL_SECONDS =~ ^[0-9]+$ ]] || wrong "--poll is '$POLL_SECONDS', not a number of seconds"
  [[ $WORKER =~ ^(all|[0-9]+)$ ]] || wrong "--worker is '$WORKER', not the number of a host"
  [[ $WORKERS =~ ^([1-9][0-9]*)?$ ]] || wrong "--workers is '$WORKERS', not a number of hosts"
  [[ $RESTARTS =~ ^[0-9]+$ ]] || wrong "--restarts is '$RESTARTS', not a number"
  [[ $EXTRAS =~ ^[a-z,]*$ ]] || wrong "--extras is '$EXTRAS', not names with commas between"
  [[ -z $RUN_BUCKET || $RUN_BUCKET == gs://?* ]] || wrong "--bucket is '$RUN_BUCKET', not gs://..."
  RUN_BUCKET=${RUN_BUCKET%/}
  local switch
  for switch in SPOT QUEUED YES DRY_RUN; do
    [[ ${!switch} =~ ^(0|1)?$ ]] || wrong "$switch is '${!switch}' in the environment: 1 or 0"
    [ "${!switch}" != 0 ] || printf -v "$switch" '%s' ''
  done
  ACCELERATOR_TYPE=${ACCELERATOR_TYPE/#v5e-/v5litepod-}
  # A slice of several is only made through a queued resource.
  [ "$NUM_SLICES" = 1 ] || QUEUED=1
  export TPU_NAME ZONE PROJECT_ID ACCELERATOR_TYPE RUNTIME_VERSION NUM_SLICES SPOT QUEUED
  export RUN_BUCKET PACKAGE EXTRAS WORKER WORKERS POLL_SECONDS DRY_RUN

  PLACE=(--quiet)
  [ -z "$ZONE" ] || PLACE+=("--zone=$ZONE")
  [ -z "$PROJECT_ID" ] || PLACE+=("--project=$PROJECT_ID")
  NODES=("$TPU_NAME")
  if [ "$NUM_SLICES" != 1 ]; then
    local slice
    for ((slice = 0; slice < NUM_SLICES; slice++)); do NODES[slice]=$TPU_NAME-$slice; done
  fi
}
