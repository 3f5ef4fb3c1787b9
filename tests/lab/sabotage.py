"""How each control is turned red on purpose, and how the node is put right again.

A sabotage does what a person in a hurry, a package or an intruder does. It runs as root on a converged lab host; commands
are sh. `also` names other controls that turn red with it and why the one cannot be had without the other.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

ENGINE, MODEL = "main", "tiny"

_UNIT = f"gpuwright-engine-{ENGINE}.service"
_CONTAINER = f"gpuwright-{ENGINE}"
_CONF = f"/etc/gpuwright/engines/{ENGINE}.conf"
_EVIDENCE = f"/var/lib/gpuwright/evidence/{ENGINE}"
_GATEWAY = "gpuwright-gateway.service"
_CADDYFILE = "/etc/gpuwright/gateway/Caddyfile"
_KEYS = "/etc/gpuwright/gateway/keys.caddy"
_LOG = "/var/log/gpuwright-gateway/access.log"
_FIREWALL = "gpuwright-firewall.service"
_RELOAD_FIREWALL = f"systemctl reload {_FIREWALL}"
_RESTART = f"systemctl reset-failed {_UNIT}; systemctl restart {_UNIT}"

# docker.service allows three starts a minute.
_RESTART_DOCKER = "systemctl reset-failed docker.service; systemctl restart docker.service"


_REFRESH = "systemctl reset-failed nvidia-cdi-refresh.service; systemctl restart nvidia-cdi-refresh.service"


@dataclass(frozen=True)
class Sabotage:
    """What to do to a node, and how to take it back."""

    do: str
    undo: str
    also: dict[str, str] = field(default_factory=dict)
    heals: bool = False
    """The next deploy puts it right by itself."""


def _container(changes: str, also: dict[str, str] | None = None) -> Sabotage:
    """The engine's container made with other arguments than the node file's; its label still claims the right ones."""
    return Sabotage(
        f"cp -a {_CONF} /run/kept.conf; sed -i {shlex.quote(changes)} {_CONF}; ! cmp -s {_CONF} /run/kept.conf || exit 1; {_RESTART}",
        f"cp -a /run/kept.conf {_CONF}; {_RESTART}",
        also or {},
    )


def _drop_in(unit: str, text: str, then: str = "true", also: dict[str, str] | None = None) -> Sabotage:
    """A drop-in somebody left, as the last of all."""
    folder = f"/etc/systemd/system/{unit}.d"
    return Sabotage(
        f"mkdir -p {folder}; printf {shlex.quote(text)} >{folder}/zz-sabotage.conf; systemctl daemon-reload; {then}",
        f"rm {folder}/zz-sabotage.conf; rmdir --ignore-fail-on-non-empty {folder}; systemctl daemon-reload; {then}",
        also or {},
    )


def _journald(text: str) -> Sabotage:
    file = "/etc/systemd/journald.conf.d/zz-sabotage.conf"
    again = "systemctl restart systemd-journald; journalctl --flush"
    return Sabotage(f"printf '[Journal]\\n{text}\\n' >{file}; {again}", f"rm {file}; {again}")


def _apt(text: str) -> Sabotage:
    """A setting of apt that somebody left in a file read after ours."""
    file = "/etc/apt/apt.conf.d/99sabotage"
    return Sabotage(f"echo {shlex.quote(text)} >{file}", f"rm {file}")


def _daemon(jq: str, then: str, heals: bool = True) -> Sabotage:
    """daemon.json changed by hand."""
    file = "/etc/docker/daemon.json"
    return Sabotage(
        f"cp -a {file} /run/kept.json; jq {shlex.quote(jq)} /run/kept.json >{file}; {then}",
        f"cp -a /run/kept.json {file}; {then}",
        heals=heals,
    )


def _foreign(flags: str) -> Sabotage:
    """A container that somebody else started."""
    image = f"$(docker container inspect --format '{{{{.Image}}}}' {_CONTAINER})"
    sleep = "--entrypoint python3 {image} -c 'import time; time.sleep(3600)'"
    return Sabotage(
        f"docker run --detach --name sabotage {flags} {sleep.format(image=image)}",
        "docker rm --force sabotage",
    )


def _rules(nft: str, also: dict[str, str] | None = None) -> Sabotage:
    """The packet filter changed by hand, as it is loaded."""
    changed = {"GPW-FIRE-003": "any change by hand makes the rules others than the node file's"}
    return Sabotage(f"nft {shlex.quote(nft)}", _RELOAD_FIREWALL, changed | (also or {}), heals=True)


def _sshd(text: str, before: str = "true", after: str = "true") -> Sabotage:
    """A file of sshd's that sorts before ours."""
    file, again = "/etc/ssh/sshd_config.d/00-a.conf", "systemctl reload ssh.service; sleep 0.3"
    return Sabotage(f"{before}; printf {shlex.quote(text)} >{file}; {again}", f"rm {file}; {after}; {again}")


def _sudoers(text: str) -> Sabotage:
    """A file of sudo's that sorts behind ours."""
    file = "/etc/sudoers.d/zzz-sabotage"
    return Sabotage(f"printf '%s\\n' {shlex.quote(text)} >{file}; chmod 0440 {file}", f"rm {file}")


def _mode(path: str, wrong: str, right: str, heals: bool = False) -> Sabotage:
    return Sabotage(f"chmod {wrong} {path}", f"chmod {right} {path}", heals=heals)


def _caddyfile(changes: str, then: str = f"systemctl reload {_GATEWAY}", before: str = "true") -> Sabotage:
    """The gateway's configuration changed by hand and loaded; what it states of itself is unchanged."""
    return Sabotage(
        f"cp -a {_CADDYFILE} /run/kept.caddy; sed -i {shlex.quote(changes)} {_CADDYFILE}; "
        f"! cmp -s {_CADDYFILE} /run/kept.caddy || exit 1; {before}; {then}",
        f"cp -a /run/kept.caddy {_CADDYFILE}; {before}; {then}",
    )


def _weights(command: str, undo: str) -> Sabotage:
    """Something done in a model's directory; $directory and $manifest are its places."""
    conf = f"/etc/gpuwright/models/{MODEL}.conf"
    places = (
        f'value() {{ sed -n "s/^$1=//p" {conf}; }}; '
        "directory=$(value store)/$(value repo)/$(value commit); manifest=$directory.manifest.json; "
        "kept=/run/kept-weights; "
    )
    return Sabotage(f"{places}mkdir -p $kept; {command}", f"{places}{undo}; rm -rf $kept")


_KEEP_MANIFEST, _OLD_MANIFEST = "cp -a $manifest $kept/manifest", "cp -a $kept/manifest $manifest"
# Its unit allows five starts in ten seconds.
_RESTART_GATEWAY = f"systemctl reset-failed {_GATEWAY}; systemctl restart {_GATEWAY}"
_JOB = f"gpuwright-model-{MODEL}.service"
# Every setting that systemd enforces through a filter.
_NO_FILTER = (
    "[Service]\\nSystemCallFilter=\\nSystemCallArchitectures=\\nRestrictAddressFamilies=\\nRestrictNamespaces=no\\n"
    "RestrictRealtime=no\\nRestrictSUIDSGID=no\\nLockPersonality=no\\nMemoryDenyWriteExecute=no\\n"
    "ProtectKernelTunables=no\\nProtectKernelModules=no\\nProtectKernelLogs=no\\nProtectClock=no\\nProtectHostname=no\\n"
    "PrivateDevices=no\\n"
)
# A unit that is confined otherwise than it was shipped is one for the control of all units, too.
_CONFINED = {"GPW-BASE-027": "it looks at the confinement of every unit"}
_WITH_THE_FILTER = {
    **_CONFINED,
    "GPW-GATE-007": "PrivateDevices= has a filter too",
    "GPW-GATE-008": "systemd enforces these settings through the filter",
}

SABOTAGES: dict[str, Sabotage] = {
    # --- base
    "GPW-BASE-001": _journald("Storage=volatile"),
    "GPW-BASE-002": _journald("SystemMaxUse=100M"),
    "GPW-BASE-004": _apt('APT::Periodic::Unattended-Upgrade "0";'),
    "GPW-BASE-005": _apt("#clear Unattended-Upgrade::Package-Blacklist;"),
    "GPW-BASE-006": Sabotage(
        "printf '$nrconf{restart} = \"a\";\\n' >/etc/needrestart/conf.d/zz-sabotage.conf",
        "rm /etc/needrestart/conf.d/zz-sabotage.conf",
    ),
    "GPW-BASE-007": Sabotage("touch /run/reboot-required", "rm /run/reboot-required"),
    "GPW-BASE-008": Sabotage("useradd --non-unique --uid 0 toor", "sed -i /^toor:/d /etc/passwd /etc/shadow"),
    "GPW-BASE-009": Sabotage("useradd sabotage; passwd --delete sabotage", "userdel sabotage"),
    "GPW-BASE-010": Sabotage("useradd --non-unique --uid 1 sabotage", "sed -i /^sabotage:/d /etc/passwd /etc/shadow"),
    "GPW-BASE-011": Sabotage(
        # read again at the next start of nftables.service only
        "mv /usr/local/lib/gpuwright/nftables-conf /var/tmp/",
        "mv /var/tmp/nftables-conf /usr/local/lib/gpuwright/",
        heals=True,
    ),
    "GPW-BASE-012": _mode("/etc/systemd/journald.conf.d/gpuwright.conf", "0666", "0644", heals=True),
    "GPW-BASE-013": Sabotage(
        "systemd-run --quiet --wait --unit=gpuwright-sabotage false || true",
        "systemctl reset-failed gpuwright-sabotage",
    ),
    "GPW-BASE-014": Sabotage(f"touch /etc/systemd/system/{_GATEWAY}", "systemctl daemon-reload", heals=True),
    "GPW-BASE-015": Sabotage(
        "mkdir -p /var/lib/gpuwright/guard/fired.deadline; printf 'id=x\\nrole=access\\nwho=x\\nseconds=120\\n' "
        ">/var/lib/gpuwright/guard/fired.deadline/about",
        "rm -r /var/lib/gpuwright/guard/fired.deadline",
        heals=True,
    ),
    "GPW-BASE-016": Sabotage(
        "systemctl disable --quiet gpuwright-guard.service",
        "systemctl enable --quiet gpuwright-guard.service",
        heals=True,
    ),
    "GPW-BASE-017": Sabotage(
        "systemctl stop --quiet gpuwright-gpu-faults.service",
        "systemctl start --quiet gpuwright-gpu-faults.service",
        heals=True,
    ),
    "GPW-BASE-018": Sabotage(
        "printf '[Service]\\nExecStart=/bin/sleep infinity\\n[Install]\\nWantedBy=multi-user.target\\n' "
        ">/etc/systemd/system/openntpd.service; systemctl daemon-reload; systemctl enable --quiet openntpd.service",
        "systemctl disable --quiet openntpd.service; rm /etc/systemd/system/openntpd.service; systemctl daemon-reload",
    ),
    "GPW-BASE-019": Sabotage(
        "printf '[Manager]\\nDefaultLimitCORE=infinity\\n' >/etc/systemd/system.conf.d/zzz-sabotage.conf; systemctl daemon-reload",
        "rm /etc/systemd/system.conf.d/zzz-sabotage.conf; systemctl daemon-reload",
    ),
    "GPW-BASE-021": _apt('Unattended-Upgrade::Origins-Pattern {"origin=Debian,codename=trixie,label=Debian";};'),
    "GPW-BASE-022": _apt('Unattended-Upgrade::Update-Days {"1";};'),
    "GPW-BASE-027": _drop_in(
        f"gpuwright-image-{ENGINE}.service", "[Service]\\nReadWritePaths=/etc\\nSystemCallFilter=@mount\\n"
    ),
    # --- access (server-cis1, with a notice, deployed by an account with sudo; tests/lab/test_access.py)
    "GPW-ACCS-001": _sshd("Match all\\n PermitRootLogin yes\\n"),
    "GPW-ACCS-002": _sshd("Match Address 10.9.0.0/16\\n PasswordAuthentication yes\\n"),
    "GPW-ACCS-003": _sshd("Match Address 10.9.*\\n PermitEmptyPasswords yes\\n"),
    "GPW-ACCS-004": _sshd("Ciphers aes128-cbc,aes256-ctr\\n"),
    "GPW-ACCS-005": _sshd("Match all\\n MaxAuthTries 50\\n"),
    "GPW-ACCS-006": _sshd("Match User nobody-of-that-name\\n AllowUsers nobody-of-that-name\\n"),
    "GPW-ACCS-007": _sshd("Match all\\n X11Forwarding yes\\n"),
    "GPW-ACCS-008": _sshd("Match all\\n ClientAliveInterval 0\\n"),
    "GPW-ACCS-009": _sshd("Match all\\n HostbasedAuthentication yes\\n"),
    "GPW-ACCS-010": Sabotage(
        # a change of mode is a change of the file
        "chmod 0666 /etc/ssh/sshd_config; systemctl reload ssh.service; sleep 0.3",
        "chmod 0644 /etc/ssh/sshd_config; systemctl reload ssh.service; sleep 0.3",
    ),
    "GPW-ACCS-011": _sshd(
        "HostKey /etc/ssh/ssh_host_sabotage_key\\n",
        "ssh-keygen -q -t rsa -b 2048 -N '' -f /etc/ssh/ssh_host_sabotage_key",
        "rm /etc/ssh/ssh_host_sabotage_key /etc/ssh/ssh_host_sabotage_key.pub",
    ),
    "GPW-ACCS-012": _sshd("Match all\\n Banner none\\n"),
    "GPW-ACCS-013": Sabotage("touch /etc/ssh/sshd_config", "systemctl reload ssh.service; sleep 0.3", heals=True),
    "GPW-ACCS-014": Sabotage(
        "ssh-keygen -q -t ed25519 -N '' -f /run/sabotage; cp -a /etc/ssh/authorized_keys.d/auditor /run/kept-keys; "
        "cat /run/sabotage.pub >>/etc/ssh/authorized_keys.d/auditor",
        "cp -a /run/kept-keys /etc/ssh/authorized_keys.d/auditor; rm /run/sabotage /run/sabotage.pub",
        heals=True,
    ),
    "GPW-ACCS-015": Sabotage("usermod --expiredate 1 auditor", "usermod --expiredate '' auditor", heals=True),
    "GPW-ACCS-016": _sudoers("Defaults !use_pty"),
    "GPW-ACCS-017": _sudoers("auditor ALL=(root) NOPASSWD: /usr/bin/id"),
    "GPW-ACCS-018": Sabotage(
        "cp -a /usr/local/lib/gpuwright/audit-snapshot /run/kept-script; echo '# x' >>/usr/local/lib/gpuwright/audit-snapshot",
        "cp -a /run/kept-script /usr/local/lib/gpuwright/audit-snapshot",
        heals=True,
    ),
    "GPW-ACCS-021": _sshd("Match all\\n LogLevel INFO\\n"),
    "GPW-ACCS-022": Sabotage("echo auditor:a-word-of-nobody-17 | chpasswd", "usermod --password '*' auditor"),
    "GPW-ACCS-023": Sabotage("gpasswd --add auditor disk", "gpasswd --delete auditor disk"),
    "GPW-ACCS-024": _sshd("Match User auditor\\n DisableForwarding no\\n"),
    # --- firewall
    "GPW-FIRE-001": _rules("chain inet gpuwright input { policy accept; }"),
    "GPW-FIRE-002": _rules(
        "chain inet gpuwright forward { policy accept; }",
        {"GPW-CONT-011": "it is this policy that keeps neighbours from containers, too"},
    ),
    "GPW-FIRE-003": Sabotage(
        "nft insert rule inet gpuwright input tcp dport 9999 accept", _RELOAD_FIREWALL, heals=True
    ),
    "GPW-FIRE-004": Sabotage(
        f"systemctl disable --quiet {_FIREWALL}", f"systemctl enable --quiet {_FIREWALL}", heals=True
    ),
    "GPW-FIRE-005": _drop_in(
        "nftables.service", "[Service]\\nExecReload=\\nExecReload=/usr/sbin/nft -f /etc/nftables.conf\\n"
    ),
    "GPW-FIRE-006": Sabotage("mkdir -p /etc/ufw; echo ENABLED=yes >/etc/ufw/ufw.conf", "rm /etc/ufw/ufw.conf"),
    "GPW-FIRE-007": _rules("insert rule inet gpuwright from_containers accept"),
    "GPW-FIRE-008": _rules("insert rule inet gpuwright input tcp dport 22 accept"),
    # --- containers
    "GPW-CONT-001": Sabotage(
        "systemctl disable --quiet docker.service", "systemctl enable --quiet docker.service", heals=True
    ),
    "GPW-CONT-002": _daemon('."live-restore" = false', "systemctl reload docker.service; sleep 1"),
    "GPW-CONT-004": _daemon(
        '.ip = "0.0.0.0"',
        # With containers running a daemon keeps its bridge as it was: a deploy puts the file right, and what Docker does
        # only follows when the engines were stopped once.
        f"systemctl stop {_UNIT}; {_RESTART_DOCKER}; {_RESTART}",
        heals=False,
    ),
    "GPW-CONT-005": _drop_in(
        "docker.service",
        "[Service]\\nExecStart=\\nExecStart=/usr/sbin/dockerd -H fd:// -H tcp://127.0.0.1:2375 --containerd=/run/containerd/containerd.sock\\n",
        _RESTART_DOCKER,
    ),
    "GPW-CONT-006": _mode("/run/docker.sock", "0666", "0660"),
    "GPW-CONT-007": Sabotage("gpasswd --add daemon docker", "gpasswd --delete daemon docker"),
    "GPW-CONT-008": _mode("/etc/docker/daemon.json", "0666", "0644"),
    "GPW-CONT-009": _daemon('."userland-proxy" = true', f"systemctl stop {_UNIT}; {_RESTART_DOCKER}; {_RESTART}"),
    "GPW-CONT-010": Sabotage("apt-mark unhold containerd", "apt-mark hold containerd", heals=True),
    "GPW-CONT-011": _rules("flush chain inet gpuwright arrival"),
    "GPW-CONT-012": _foreign("--privileged --network none"),
    "GPW-CONT-013": _foreign("--network host"),
    "GPW-CONT-014": _foreign("--publish 0.0.0.0:18998:8000"),
    "GPW-CONT-015": _foreign("--network none --volume /run/docker.sock:/run/docker.sock"),
    "GPW-CONT-016": _foreign("--network none --security-opt seccomp=unconfined"),
    "GPW-CONT-017": _foreign("--network none --log-opt max-size=4g"),
    "GPW-CONT-018": _drop_in("docker.service", "[Service]\\nNUMAPolicy=bind\\nNUMAMask=0\\n"),
    # --- containers, the GPU half (a host with stand-in GPUs; tests/lab/test_cdi_ring.py)
    "GPW-CONT-019": Sabotage(
        "cd /tmp; apt-get -q download libnvidia-container1=1.18.0-1; dpkg --force-depends -i libnvidia-container1_1.18.0*.deb; "
        "apt-mark hold libnvidia-container1",
        "apt-get -y -q --allow-change-held-packages install libnvidia-container1=1.18.2-1; apt-mark hold libnvidia-container1",
        heals=True,
    ),
    "GPW-CONT-020": Sabotage("apt-mark unhold libnvidia-container1", "apt-mark hold libnvidia-container1", heals=True),
    "GPW-CONT-021": _daemon(".features.cdi = false", _RESTART_DOCKER),
    "GPW-CONT-022": Sabotage(
        "mkdir -p /etc/cdi; cp /run/cdi/nvidia.yaml /etc/cdi/", "rm -f /etc/cdi/nvidia.yaml", heals=True
    ),
    "GPW-CONT-023": Sabotage(
        "sed -i 's/[.]so[.]580[.]95[.]05/.so.570.10.10/' /run/cdi/nvidia.yaml", _REFRESH, heals=True
    ),
    "GPW-CONT-024": Sabotage(
        "systemctl disable -q --now nvidia-cdi-refresh.path",
        "systemctl enable -q --now nvidia-cdi-refresh.path",
        heals=True,
    ),
    "GPW-CONT-025": _foreign("--network none --device nvidia.com/gpu=0"),
    "GPW-CONT-026": Sabotage(
        f"nsenter --mount --target $(docker inspect --format '{{{{.State.Pid}}}}' {_CONTAINER}) "
        """sh -c 'set -- /dev/nvidia[0-9]*; rm "$1"'""",
        _RESTART,
    ),
    "GPW-CONT-027": _daemon(
        '."default-runtime" = "nvidia" | .runtimes.nvidia = {"path": "/usr/sbin/runc"}', _RESTART_DOCKER, heals=False
    ),
    # --- memory
    "GPW-MEMO-003": _drop_in(f"gpuwright-image-{ENGINE}.service", "[Service]\\nNUMAPolicy=default\\nNUMAMask=\\n"),
    # --- models
    "GPW-MODL-001": _weights(
        f'{_KEEP_MANIFEST}; jq \'.revision |= gsub("[0-9a-f]"; "0")\' $kept/manifest >$manifest', _OLD_MANIFEST
    ),
    "GPW-MODL-002": _weights(
        "cp -a $directory/model.safetensors $kept/; truncate --size=-1 $directory/model.safetensors",
        "cp -a $kept/model.safetensors $directory/",
    ),
    "GPW-MODL-003": _weights(
        "cp -a $directory/config.json $kept/; sed -i '1s/./ /' $directory/config.json",
        "cp -a $kept/config.json $directory/",
    ),
    "GPW-MODL-004": _weights("echo 'import os' >$directory/modeling_extra.py", "rm $directory/modeling_extra.py"),
    "GPW-MODL-005": _weights(
        f"{_KEEP_MANIFEST}; : >$directory/extra.bin; "
        'jq --arg sum "$(sha256sum </dev/null | cut -d" " -f1)" '
        "'.files += [{path: \"extra.bin\", size: 0, sha256: $sum}]' $kept/manifest >$manifest",
        f"{_OLD_MANIFEST}; rm $directory/extra.bin",
    ),
    "GPW-MODL-006": _weights("chmod o+w $directory", "chmod o-w $directory"),
    "GPW-MODL-007": Sabotage(
        # A stand-in for a token: the shape, and nothing behind it.
        "shape=hf_; HF_TOKEN=${shape}$(printf 'A%.0s' $(seq 40)) setsid sleep 3600 >/dev/null 2>&1 & echo $! >/run/sabotage.pid; sleep 0.3",
        "kill $(cat /run/sabotage.pid); sleep 0.3",
    ),
    "GPW-MODL-008": _drop_in(_JOB, "[Service]\\nNUMAPolicy=default\\nNUMAMask=\\n"),
    "GPW-MODL-009": _drop_in(_JOB, "[Service]\\nDynamicUser=no\\nUser=root\\n"),
    "GPW-MODL-010": _drop_in(_JOB, "[Service]\\nNoNewPrivileges=no\\n", also=_CONFINED),
    # --- engine
    "GPW-ENGN-001": Sabotage(f"systemctl disable --quiet {_UNIT}", f"systemctl enable --quiet {_UNIT}", heals=True),
    "GPW-ENGN-002": Sabotage(
        f"image=$(docker container inspect --format '{{{{.Image}}}}' {_CONTAINER}); cp -a {_CONF} /run/kept.conf; "
        "id=$(docker commit --change 'LABEL sabotage=yes' "
        f'{_CONTAINER} sabotage:latest); sed -i "s|^image=.*|image=sabotage:latest|" {_CONF}; {_RESTART}',
        f"cp -a /run/kept.conf {_CONF}; {_RESTART}; docker image rm sabotage:latest",
    ),
    "GPW-ENGN-003": _container(r"s/^config=\(.*\)\(.\)$/config=\10/; s/^config=\(.*\)00$/config=\1f0/"),
    "GPW-ENGN-004": _container("/--read-only/d"),
    "GPW-ENGN-005": _container("s/--cap-drop=ALL/--cap-drop=NET_RAW/"),
    "GPW-ENGN-006": _container("s/--security-opt=no-new-privileges/&=false/"),
    "GPW-ENGN-007": _container(
        "s/  --read-only/&\\n  --security-opt=seccomp=unconfined/",
        {"GPW-CONT-016": "only a container that Docker was told to run without a filter has none"},
    ),
    "GPW-ENGN-008": _container("s/--user=10001:10001/--user=10001:0/"),
    "GPW-ENGN-009": _container("s/--ulimit=core=0/--ulimit=core=4096/"),
    "GPW-ENGN-010": _drop_in(
        "containerd.service",
        "[Service]\\nNUMAPolicy=bind\\nNUMAMask=0\\n",
        f"systemctl restart containerd.service; {_RESTART}",
        {"GPW-CONT-018": "a memory policy is inherited: a container gets one from containerd and from nobody else"},
    ),
    "GPW-ENGN-011": Sabotage(
        f"docker update --restart=always {_CONTAINER}", f"docker update --restart=no {_CONTAINER}"
    ),
    "GPW-ENGN-012": Sabotage(
        f"docker network create sabotage; docker network connect sabotage {_CONTAINER}",
        f"docker network disconnect sabotage {_CONTAINER}; docker network rm sabotage",
    ),
    "GPW-ENGN-013": _container("s/  --read-only/&\\n  --publish=127.0.0.1:18999:8000/"),
    "GPW-ENGN-014": _container("s/  --read-only/&\\n  --env=LAB_API_TOKEN=1/"),
    "GPW-ENGN-015": _container("s/--env=HF_HUB_OFFLINE=1/--env=HF_HUB_OFFLINE=0/"),
    "GPW-ENGN-016": _container("s/  --read-only/&\\n  --env=VLLM_SERVER_DEV_MODE=1/"),
    "GPW-ENGN-017": _container("s/^  serve$/  serve\\n  --trust-remote-code/"),
    "GPW-ENGN-018": _drop_in(_UNIT, "[Service]\\nRestartSec=7\\n"),
    "GPW-ENGN-019": _drop_in(
        _UNIT,
        "[Unit]\\nStartLimitIntervalSec=60\\n",
        also={"GPW-ENGN-018": "a node file that breaks the rule is refused, so only a unit that differs from it can"},
    ),
    "GPW-ENGN-020": _drop_in(_UNIT, "[Service]\\nTimeoutStartSec=10\\n"),
    "GPW-ENGN-021": _drop_in(_UNIT, "[Unit]\\nRequires=docker.service\\n"),
    "GPW-ENGN-022": _drop_in(_UNIT, "[Service]\\nRestartPreventExitStatus=\\n"),
    "GPW-ENGN-023": Sabotage(
        f"mv /run/gpuwright/ready/{ENGINE} /run/kept-ready",
        f"mv /run/kept-ready /run/gpuwright/ready/{ENGINE}",
        heals=True,
    ),
    "GPW-ENGN-024": _mode(_EVIDENCE, "0755", "0700"),
    "GPW-ENGN-025": Sabotage(
        f"umask 077; mkdir {_EVIDENCE}/sabotage; head -c 70M /dev/zero >{_EVIDENCE}/sabotage/big",
        f"rm -r {_EVIDENCE}/sabotage",
    ),
    "GPW-ENGN-026": _container("s/,target=\\/model,readonly/,target=\\/model/"),
    "GPW-ENGN-027": Sabotage(
        f"cp -a {_CONF} /run/kept.conf; from=$(sed -n 's/^model_directory=//p' {_CONF}); cp -a $from /srv/sabotage; "
        f'sed -i "s|source=$from,target=/model|source=/srv/sabotage,target=/model|" {_CONF}; {_RESTART}',
        f"cp -a /run/kept.conf {_CONF}; {_RESTART}; rm -r /srv/sabotage",
    ),
    "GPW-ENGN-028": _container("s/--tmpfs=\\/tmp:rw,exec/--tmpfs=\\/tmp:rw,noexec/"),
    "GPW-ENGN-029": _container("s/--shm-size=.*/--shm-size=67108864/"),
    "GPW-ENGN-031": _container("s/  --read-only/&\\n  --device=\\/dev\\/full/"),
    # --- gateway
    "GPW-GATE-001": Sabotage(
        f"systemctl disable --quiet {_GATEWAY}", f"systemctl enable --quiet {_GATEWAY}", heals=True
    ),
    "GPW-GATE-002": Sabotage(
        "cd /usr/local/lib/gpuwright; cp -a caddy /var/tmp/kept-caddy; cp caddy .other; printf x >>.other; mv .other caddy; "
        + _RESTART_GATEWAY,
        f"mv /var/tmp/kept-caddy /usr/local/lib/gpuwright/caddy; {_RESTART_GATEWAY}",
        heals=True,
    ),
    "GPW-GATE-003": _drop_in(_GATEWAY, "[Service]\\nUser=daemon\\n", _RESTART_GATEWAY),
    "GPW-GATE-004": _drop_in(_GATEWAY, "[Service]\\nCapabilityBoundingSet=CAP_CHOWN\\n", _RESTART_GATEWAY, _CONFINED),
    "GPW-GATE-005": _drop_in(
        _GATEWAY,
        f"{_NO_FILTER}NoNewPrivileges=no\\n",
        _RESTART_GATEWAY,
        {
            "GPW-GATE-006": "systemd sets no_new_privs itself for a filter without CAP_SYS_ADMIN (systemd.exec(5))",
            **_WITH_THE_FILTER,
        },
    ),
    "GPW-GATE-006": _drop_in(_GATEWAY, _NO_FILTER, _RESTART_GATEWAY, _WITH_THE_FILTER),
    "GPW-GATE-007": _drop_in(_GATEWAY, "[Service]\\nProtectHome=no\\n", _RESTART_GATEWAY, _CONFINED),
    "GPW-GATE-008": _drop_in(_GATEWAY, "[Service]\\nMemoryDenyWriteExecute=no\\n", also=_CONFINED),
    "GPW-GATE-009": _drop_in(_GATEWAY, "[Service]\\nLimitCORE=infinity\\n", _RESTART_GATEWAY, _CONFINED),
    "GPW-GATE-010": _drop_in(_GATEWAY, "[Service]\\nTimeoutStopSec=7\\n"),
    "GPW-GATE-011": _mode(_KEYS, "0644", "0640", heals=True),
    "GPW-GATE-012": Sabotage(
        f"cp -a {_KEYS} /run/kept.keys; printf 'mallory-01 $2a$04${'A' * 53}\\n' >>{_KEYS}",
        f"cp -a /run/kept.keys {_KEYS}",
        heals=True,
    ),
    "GPW-GATE-013": Sabotage(
        f"cp -a {_KEYS} /run/kept.keys; sed -i 's/\\$04\\$/$10$/' {_KEYS}", f"cp -a /run/kept.keys {_KEYS}", heals=True
    ),
    "GPW-GATE-014": _mode("/run/gpuwright-gateway/admin.sock", "0666", "0600"),
    "GPW-GATE-015": _caddyfile("$a http://sabotage:18997 {\\n\\tbind 127.0.0.1\\n\\trespond 401\\n}"),
    "GPW-GATE-016": _caddyfile("/^http:\\/\\/gateway-health/,/bind/s/bind 127.0.0.1/bind tcp4\\/0.0.0.0/"),
    "GPW-GATE-017": _caddyfile('s/^\\(\\trespond "\\)[0-9a-f]\\{8\\}/\\100000000/'),
    "GPW-GATE-018": _caddyfile(
        "s/^\\ttls internal$/\\ttls {\\n\\t\\tissuer internal {\\n\\t\\t\\tlifetime 20m\\n\\t\\t}\\n\\t}/",
        _RESTART_GATEWAY,
        "rm -rf /var/lib/gpuwright-gateway/caddy/certificates/local",
    ),
    "GPW-GATE-019": _caddyfile("s/^\\troute {$/&\\n\\t\\trespond \\/v1\\/models open 200/"),
    "GPW-GATE-020": Sabotage(
        f"stat -c %s {_LOG} >/run/kept.size; echo 'not JSON' >>{_LOG}", f"truncate --size=$(cat /run/kept.size) {_LOG}"
    ),
    "GPW-GATE-021": Sabotage(
        f'stat -c %s {_LOG} >/run/kept.size; echo \'{{"user_id":"a","header":"Bearer b"}}\' >>{_LOG}',
        f"truncate --size=$(cat /run/kept.size) {_LOG}",
    ),
    "GPW-GATE-022": _mode(_LOG, "0644", "0600"),
    "GPW-GATE-023": Sabotage(
        "find /var/lib/gpuwright-gateway -name '*.key' -exec chmod o+r {} +",
        "find /var/lib/gpuwright-gateway -name '*.key' -exec chmod o-r {} +",
    ),
    "GPW-GATE-024": Sabotage(
        "nft flush chain inet gpuwright_engines output", "systemctl reload gpuwright-engine-guard.service", heals=True
    ),
}

# What needs a host with stand-in GPUs; on others these controls do not arise.
WITH_GPUS = tuple(f"GPW-CONT-{number:03}" for number in range(19, 28))

# Red only on a recorded snapshot with one answer changed (tests/unit/audit): a lab host cannot be made so.
_OF_A_MACHINE = "a lab host is a container and has its machine's memory; tests/machine/test_memory.py turns it red"
_BUS_OF_A_MACHINE = "a lab host is a container and has its machine's bus; tests/machine/test_pcie.py turns it red"
_OF_SEVERAL_GPUS = "this host's engine has no GPUs; tests/lab/test_p2p.py turns it red on a host with stand-in GPUs"
_KERNEL_OF_A_MACHINE = "a lab host has its machine's kernel; tests/machine/kernel_sabotage.py turns it red on a machine"
_PROFILE_OF_A_MACHINE = (
    "a lab host has its machine's kernel; tests/machine/hardening_sabotage.py turns it red on a machine"
)

NOT_IN_THE_LAB: dict[str, str] = {
    **{f"GPW-KERN-{number:03}": _KERNEL_OF_A_MACHINE for number in range(1, 15)},
    **{f"GPW-KERN-{number:03}": _PROFILE_OF_A_MACHINE for number in (15, 16)},
    **{f"GPW-BASE-{number:03}": _PROFILE_OF_A_MACHINE for number in (20, 23, 24, 25, 26)},
    "GPW-BASE-003": "a lab host is a container and has its machine's clock: tests/machine/test_machine_ring.py",
    "GPW-CONT-003": "with another data root Docker knows no container, and every control of engines would be red too",
    "GPW-ENGN-030": "the kernel below the lab gives Docker no pids and no memory controller",
    "GPW-ENGN-032": "no lab host has memory nodes without CPUs",
    "GPW-PCIE-001": _BUS_OF_A_MACHINE,
    "GPW-PCIE-002": _BUS_OF_A_MACHINE,
    "GPW-PCIE-003": _BUS_OF_A_MACHINE,
    "GPW-PCIE-004": _BUS_OF_A_MACHINE,
    "GPW-PCIE-005": _BUS_OF_A_MACHINE,
    "GPW-PCIE-006": _BUS_OF_A_MACHINE,
    "GPW-PCIE-007": _BUS_OF_A_MACHINE,
    "GPW-PCIE-008": _BUS_OF_A_MACHINE,
    "GPW-ENGN-033": _OF_SEVERAL_GPUS,
    "GPW-PCIE-009": _OF_SEVERAL_GPUS,
    "GPW-PCIE-010": _OF_SEVERAL_GPUS,
    "GPW-NVID-012": "a lab host has no firmware, and so no Secure Boot; doctored in tests/unit/nvidia/test_nvidia_checks.py",
    "GPW-MEMO-001": _OF_A_MACHINE,
    "GPW-MEMO-002": _OF_A_MACHINE,
    "GPW-MEMO-004": _OF_A_MACHINE,
    "GPW-MEMO-005": _OF_A_MACHINE,
}

# One of each kind: a host setting, a daemon's setting, the kernel's table, weights, a container, the gateway.
SAMPLE = (
    "GPW-BASE-002",
    "GPW-CONT-002",
    "GPW-CONT-011",
    "GPW-FIRE-002",
    "GPW-MODL-003",
    "GPW-ENGN-005",
    "GPW-GATE-012",
)
