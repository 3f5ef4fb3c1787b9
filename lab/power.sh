#!/bin/sh
# A lab host's power supply: boots it, boots it again when it wants to reboot, ends when it is switched off.
# usage: power.sh DIR NAME NETNS BRIDGE VETH MAC CGROUP
#   DIR      the host's directory: root/ is its disk, console its console, pid and cgroup are written for the lab
#   CGROUP   a cgroup2 directory to create, or "own": the one this script was started in (a delegated systemd unit)
set -u
dir=$1 name=$2 netns=$3 bridge=$4 veth=$5 mac=$6 cgroup=$7

if [ "$cgroup" = own ]; then
    mount=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
    cgroup=$mount$(sed -n 's/^0:://p' /proc/self/cgroup)
fi
# Two children: a cgroup with processes of its own cannot hand controllers down (kernel doc, cgroup-v2, "No Internal
# Process Constraint"), and nspawn wants a subtree that nobody else uses.
mkdir -p "$cgroup/watch" "$cgroup/machine" || exit 1
echo $$ >"$cgroup/watch/cgroup.procs" || exit 1
read -r controllers <"$cgroup/cgroup.controllers" || controllers=
for controller in $controllers; do
    echo "+$controller" >"$cgroup/cgroup.subtree_control" 2>/dev/null || true
done
echo "$cgroup" >"$dir/cgroup"

unplug() {
    ip link del "$veth" 2>/dev/null || true
    ip netns del "$netns" 2>/dev/null || true
}

# A fresh namespace at every boot: a real reboot forgets routes and firewall rules, too.
plug() {
    unplug
    ip netns add "$netns" &&
        ip link add "$veth" type veth peer name host0 address "$mac" netns "$netns" &&
        ip link set "$veth" master "$bridge" up
}

while plug; do
    # The two variables, all capabilities and the two system calls are what Docker needs inside.
    # shellcheck disable=SC2016
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_API_VFS_WRITABLE=network \
        sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$cgroup/machine" \
        systemd-nspawn --quiet --boot --directory="$dir/root" --machine="$name" \
        --register=no --keep-unit --settings=no --console=pipe \
        --resolv-conf=off --timezone=off --link-journal=no \
        --capability=all --system-call-filter='@keyring bpf' \
        --network-namespace-path="/run/netns/$netns" \
        </dev/null >>"$dir/console" 2>&1
    status=$?
    unplug
    # 133: the host asked for a reboot (systemd-nspawn(1), Exit status). The file: the lab cut the power to switch it on again.
    if [ "$status" -ne 133 ] && [ ! -e "$dir/power-cycle" ]; then
        echo "power: off, status $status" >>"$dir/console"
        exit 0
    fi
    rm -f "$dir/power-cycle"
    echo "power: booting again, status $status" >>"$dir/console"
done
