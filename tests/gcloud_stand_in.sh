#!/usr/bin/env bash
# Plays gcloud, xpk and kubectl for test_tpu_scripts.py: records its calls and answers as it is told.
#
# In the folder $STAND_IN: `calls` gets the words of each call, \x1f after each and \x1e after all;
# `states` holds a line for each describe (the last one stays), `statuses` one for each status asked
# of a worker; `failures` lines "PATTERN|TIMES|EXIT STATUS|message", of which the first with a PATTERN
# within the call and TIMES left makes it fail. `bucket/` is what lies under gs://.
here=$PWD
cd "$STAND_IN" || exit 99
exec 7>lock && flock 7
words=$(printf '%s\x1f' "${0##*/}" "$@")
printf '%s\x1e' "$words" >>calls

next() { # FILE: its first line, which goes unless it is the last
  head -n 1 "$1"
  if [ "$(wc -l <"$1")" -gt 1 ]; then sed -i 1d "$1"; fi
}

if [ -e failures ]; then
  number=0 left=$(cat failures)
  while IFS='|' read -r pattern times status message; do
    number=$((number + 1))
    if [[ "$*" == *"$pattern"* && $times -gt 0 ]]; then
      sed -i "${number}s/|$times|/|$((times - 1))|/" failures
      printf '%b\n' "$message" >&2
      exit "$status"
    fi
  done <<<"$left"
fi

case "$*" in
  *'value(networkEndpoints.len())'*) cat hosts ;;
  *' describe '*)
    state=$(next states)
    if [ "$state" = NOT_FOUND ]; then
      echo "ERROR: (gcloud) NOT_FOUND: Resource 'projects/p/locations/z/nodes/my-tpu' was not found" >&2
      exit 1
    fi
    echo "$state"
    ;;
  *'on_worker.sh status'*) 
    for ((worker = 0; worker < $(cat hosts); worker++)); do
      echo "slice 0 worker $worker: $(head -n 1 statuses)"
    done
    [[ "$*" != *SLICE=0* ]] || next statuses >/dev/null
    ;;
  *'on_worker.sh follow'*)
    exec 7>&-
    [[ "$*" =~ --worker=([0-9]+) ]] && worker=${BASH_REMATCH[1]}
    for line in 1 2 3; do printf 'line %s of %s\n' "$line" "$5 $worker"; done
    printf 'no newline'
    ;;
  'storage cp '*)
    to=bucket/${*: -1}
    to=${to/gs:\/\//}
    mkdir -p "${to%/*}" && cat >"$to"
    ;;
  'storage rsync '*)
    path() { if [[ $1 == gs://* ]]; then echo "$STAND_IN/bucket/${1#gs://}"; else echo "$here/$1"; fi; }
    from=$(path "${*: -2:1}") to=$(path "${*: -1}") # files only: a bucket has no empty folders
    [ -d "$from" ] || exit 1
    (cd "$from" && find . -type f ! -name "$([[ "$*" != *--exclude* ]] || echo lock.json)") |
      while IFS= read -r file; do
        [[ "$*" == *--no-clobber* && -e $to/$file ]] && continue
        mkdir -p "$to/${file%/*}" && cp --preserve=timestamps "$from/$file" "$to/$file"
      done
    [[ "$*" != *--delete-unmatched* ]] || (cd "$to" && find . -type f) |
      while IFS= read -r file; do [ -e "$from/$file" ] || rm "$to/$file"; done
    ;;
esac
