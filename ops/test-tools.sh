#!/bin/sh
# Installs what some tests look at dora with: a browser (Chromium) for reports, and Prometheus for
# metrics. Never fails: where it cannot install them it says so, and those tests are skipped.
missing=""
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
  command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium"
command -v prometheus >/dev/null 2>&1 || missing="$missing prometheus"
[ -z "$missing" ] && exit 0

give_up() {
  echo "test tools are missing:$missing ($1); the tests that need them are skipped" >&2
  exit 0
}

command -v apt-get >/dev/null 2>&1 || give_up "there is no apt-get here"
[ "$(id -u)" = 0 ] || give_up "not root; run: sudo apt-get install --no-install-recommends$missing"
echo "installing$missing for the tests"
log=$(mktemp) || give_up "no temporary file"
# Debian's package would start a server of its own.
policy=/usr/sbin/policy-rc.d
made=""
if [ ! -e "$policy" ] && printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"; then
  made=yes
fi
export DEBIAN_FRONTEND=noninteractive
{
  timeout 120 apt-get update
  # shellcheck disable=SC2086 # a list of packages
  timeout 600 apt-get install -y --no-install-recommends $missing
} >"$log" 2>&1 || failed=yes
[ -n "$made" ] && rm -f "$policy"
if [ -n "${failed:-}" ]; then
  tail -n 5 "$log" >&2
  rm -f "$log"
  give_up "apt-get failed"
fi
rm -f "$log"
