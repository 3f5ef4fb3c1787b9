#!/bin/sh
# A lab host's power supply: boots it, boots it again when it wants to reboot, ends when it is switched off.
# usage: power.sh DIR NAME NETNS BRIDGE VETH MAC CGROUP
#   DIR      the host's directory, with machine.sh; written here: console, and cgroup, where its processes are
#   CGROUP   a cgroup2 directory to create, or "own": the one this script was started in (a delegated systemd unit)
set -u
dir=$1 name=$2 netns=$3 bridge=$4 veth=$5 mac=$6 cgroup=$7

if [ "$cgroup" = own ]; then
    cgroup=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)$(sed -n 's/^0:://p' /proc/self/cgroup)
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
    # The disk is mounted in a namespace of the machine's own, so that it is gone when its processes are. Propagation
    # "slave": a network namespace removed out here must not live on in there.
    unshare --mount --propagation slave sh "$dir/machine.sh" "$dir" "$name" "$netns" "$cgroup/machine" \
        </dev/null >>"$dir/console" 2>&1
    status=$?
    unplug
    # 133: the host asked for a reboot (systemd-nspawn(1), Exit status). The file: the lab cut its power for a moment.
    if [ "$status" -ne 133 ] && [ ! -e "$dir/power-cycle" ]; then
        echo "power: off, status $status" >>"$dir/console"
        exit 0
    fi
    rm -f "$dir/power-cycle"
    echo "power: booting again, status $status" >>"$dir/console"
done
