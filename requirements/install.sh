#!/usr/bin/env bash
# install.sh VENV COUNT PIP-ARGUMENTS...: pip install of COUNT packages into VENV, with a line now and then that says how
# far it is: pip itself says nothing for minutes while it unpacks, and its bar needs a terminal.
set -euo pipefail
venv=$1 count=$2
shift 2
every=${INSTALL_LINE_S:-10} log=$venv/install.log began=$SECONDS
count_lines() {
  while sleep "$every" >/dev/null 2>&1; do
    # Names, since pip names a package again for each that asks for it, and names this tree, which is not in the count.
    found=$(sed -nE 's/^Collecting ([A-Za-z0-9._-]+).*/\1/p' "$log" | sort -u | wc -l)
    found=$((found < count ? found : count))
    installed=$(find "$venv"/lib/*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l)
    if grep -q '^Installing collected packages' "$log"; then
      echo "venv: $((SECONDS - began)) s: all fetched; pip unpacks them, and says nothing for minutes: $installed installed"
    else
      echo "venv: $((SECONDS - began)) s: $found of $count packages found and fetched, $installed installed"
    fi
  done
}
count_lines &
trap 'kill %1' EXIT
"$venv/bin/pip" install --disable-pip-version-check --no-input --progress-bar off "$@" >"$log" 2>&1 ||
  { tail -n 20 "$log" >&2; exit 1; }
