#!/bin/sh
# One boot of a lab host; ends with systemd-nspawn's exit status.
# usage: machine.sh DIR NAME NETNS CGROUP   (in a mount namespace of its own)
#   DIR  the host's directory. Its disk: the directory named in image below, upper/ on top
set -eu
dir=$1 name=$2 netns=$3 cgroup=$4

echo $$ >"$cgroup/cgroup.procs"
mount -t overlay overlay -o "lowerdir=$(cat "$dir/image"),upperdir=$dir/upper,workdir=$dir/work" "$dir/root"

# Docker's overlay2 does not work on overlayfs: its folders are plain ones beside the disk. The two variables, all
# capabilities and the two groups of system calls are what Docker needs inside (DESIGN section 6).
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 SYSTEMD_NSPAWN_API_VFS_WRITABLE=network
exec systemd-nspawn --quiet --boot --directory="$dir/root" --machine="$name" \
    --register=no --keep-unit --settings=no --console=pipe \
    --resolv-conf=off --timezone=off --link-journal=no \
    --bind="$dir/docker:/var/lib/docker" --bind="$dir/containerd:/var/lib/containerd" \
    --capability=all --system-call-filter='@keyring bpf' \
    --network-namespace-path="/run/netns/$netns"
