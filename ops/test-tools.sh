#!/bin/sh
# Installs what some tests look at dora with: a browser (Chromium) for reports, and Prometheus for
# metrics. Where it cannot install them it says what to install; the tests that need them are then
# skipped, or fail where CI=true.
missing=""
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
  command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium"
command -v prometheus >/dev/null 2>&1 || missing="$missing prometheus"
[ -z "$missing" ] && exit 0

leave_it() {
  echo "some tests will be skipped without:$missing ($1)" >&2
  exit 0
}

command -v apt-get >/dev/null 2>&1 || leave_it "there is no apt-get here"
[ "$(id -u)" = 0 ] || leave_it "not root; run: sudo apt-get install --no-install-recommends$missing"
echo "installing$missing for the tests"
log=$(mktemp)
made=""
trap 'rm -f "$log" $made' EXIT
trap 'exit 130' INT TERM
# Debian's package would start a server of its own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  made=$policy
  printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
{
  timeout 120 apt-get -o Acquire::Retries=3 update
  # shellcheck disable=SC2086 # a list of packages
  timeout 600 apt-get -o Acquire::Retries=3 install -y --no-install-recommends $missing
} >"$log" 2>&1 || {
  tail -n 20 "$log" >&2
  leave_it "apt-get could not install them; the end of its output is above"
}
