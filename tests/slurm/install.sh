#!/bin/sh
# Installs SLURM and munge for the tests of this folder where they are missing: with apt, as root, starting no service.
# Where that is not possible it says so, and the tests are skipped.
PATH="$PATH:/usr/sbin:/sbin"
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && exit 0

give_up() {
    echo "=== The tests on a real SLURM will be SKIPPED: $1. By hand: apt-get install slurm-wlm munge ==="
    exit 0
}
[ "$(id -u)" = 0 ] || give_up "installing it needs root"
command -v apt-get >/dev/null || give_up "there is no apt-get"

echo "installing slurm-wlm and munge for the tests of campaigns"
policy=/usr/sbin/policy-rc.d # keeps the packages from starting their services
made=no
[ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy && made=yes; }
log=$(mktemp)
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; } \
    >"$log" 2>&1
code=$?
[ $made = yes ] && rm -f $policy
[ $code = 0 ] || { tail -n 5 "$log"; rm -f "$log"; give_up "apt-get failed"; }
rm -f "$log"
