#!/usr/bin/env bash
# Installs jaxpost on every host of a TPU, and copies files there, into ~/jaxpost.
#
#   setup.sh --name my-tpu --zone us-west4-a [--extras rewards] my_run.yaml my_data.jsonl
#
# Commands run in ~/jaxpost, so a configuration names its data as it does here: by file name. The
# same command again brings everything up to date.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/settings.sh"
. "$HERE/calls.sh"
read_settings "name zone project slices worker package extras FILE" "$@"

again="the same command again goes on; with --worker N, for one host only"
for file in ${FILES[@]+"${FILES[@]}"}; do
  [ -e "$file" ] || wrong "there is no $file"
done
sources=("$HERE/on_worker.sh" ${FILES[@]+"${FILES[@]}"})
if [ -z "$PACKAGE" ]; then
  checkout=$(dirname "$HERE")
  PACKAGE="./jaxpost.tar.gz[tpu${EXTRAS:+,$EXTRAS}]"
  call "is the disk full?" mkdir -p "$checkout/build"
  call "is $checkout a checkout of jaxpost?" tar -czf "$checkout/build/jaxpost.tar.gz" \
    --exclude=__pycache__ -C "$checkout" pyproject.toml README.md LICENSE jaxpost
  sources+=("$checkout/build/jaxpost.tar.gz")
elif [ -n "$EXTRAS" ]; then
  wrong "--extras says nothing about --package; write them into it: 'jaxpost[tpu,$EXTRAS]'"
fi

on_slices "$again; several hosts at once want the key in ssh-agent: \
ssh-add ~/.ssh/google_compute_engine" ssh_line mkdir -p jaxpost
on_slices "$again" scp_line "${sources[@]}"
on_slices "$again" ssh_line bash jaxpost/on_worker.sh install "$PACKAGE"
