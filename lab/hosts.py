"""Lab hosts: systemd-nspawn containers with a disk, a network card and a life of their own (DESIGN section 6).

A host is a directory: ``host.json`` what it is, ``upper/`` what its disk has over the image, ``console`` what it printed, ``cgroup`` where its
processes are. What runs is read from the kernel, never from a record, so that a killed run leaves nothing unknown.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from lab import blank, network, proxy, registry, repository, server, tools
from lab.command import LabError, run
from lab.network import Segment
from lab.paths import locked, make_private, state
from lab.progress import step
from lab.server import Server

_OCTETS = range(11, 200)
# Going down may take systemd's whole stop timeout twice: units, then containers that live-restore left behind.
_DOWN_LIMIT = 240.0
_DISK = ("upper", "work", "root", "docker", "containerd")


@dataclass(frozen=True)
class Host(Server):
    """A throwaway container. Everything it does not remember here, it forgets at ``reset``."""

    kind = "host"
    boot_limit = 60.0  # a boot takes two or three
    patience = 5

    octet: int  # last part of its address

    @property
    def address(self) -> str:
        return self.segment.address(self.octet)

    @property
    def address6(self) -> str:
        return self.segment.address6(self.octet)

    @property
    def known_hosts(self) -> Path:
        return state() / "known_hosts"

    @property
    def namespace(self) -> str:
        """Its network namespace, for ``ip netns exec``."""
        return self.segment.namespace(self.name)

    @property
    def running(self) -> bool:
        """Whether its power supply is on: it is up, booting or rebooting, and comes back by itself."""
        return _populated(self._cgroup() / "watch")

    def reboot(self) -> None:
        """Reboot as ``systemctl reboot`` does, without needing its network; returns when it is up again, disk kept."""
        self._off_and_on(lambda: os.kill(self._init(), signal.SIGRTMIN + 5))  # systemd(1), signals: reboot.target

    def power_cycle(self) -> None:
        """Cut the power in the middle of everything and switch it on again: every process dies at once, the disk stays."""

        def cut() -> None:
            (self.directory / "power-cycle").touch()
            # The end of a PID namespace's first process is the end of all of them. Not cgroup.kill: the next boot lives in
            # the same cgroup, where the kernel then kills what its systemd forks into new ones (seen on Linux 6.18).
            os.kill(self._init(), signal.SIGKILL)

        self._off_and_on(cut)

    def reset(self) -> None:
        """Make it blank again: everything on its disk is gone, name, address and host key stay. Seconds."""
        with step(f"Resetting {self.name}"), self._alone():
            self.power_off()
            self._install()
            self._switch_on()
            self.wait()

    def destroy(self) -> None:
        """Take it away for good."""
        with self._alone():
            self.power_off()
            gone = self.directory.with_name(f".gone-{uuid.uuid4().hex}")
            with locked(state() / "lock"):
                self._record().unlink()
                self.directory.rename(gone)
                _record_host_keys()
            server.remove(gone)

    def power_off(self) -> None:
        """End all its processes at once and unplug it. Nothing happens when it is off."""
        _kill(self._cgroup())
        run(["ip", "link", "del", self.segment.veth(self.octet)], check=False)
        run(["ip", "netns", "del", self.namespace], check=False)

    def _powered(self) -> bool:
        return _populated(self._cgroup())

    def _install(self) -> None:
        """Give it a blank disk: a shared image below, and on top what makes this host this one."""
        image = blank.image(self.release, self.segment)
        (self.directory / "image").unlink(missing_ok=True)
        for name in _DISK:
            server.remove(self.directory / name)
            (self.directory / name).mkdir()
        self._personalise(self.directory / "upper", image)
        (self.directory / "image").write_text(f"{image}\n")

    def _personalise(self, top: Path, image: Path) -> None:
        shutil.copystat(image, top)
        files = {
            **self._identity(),
            "etc/hosts": self._names(self.address),
            "etc/systemd/network/10-host0.network": (
                f"[Match]\nName=host0\n\n[Network]\nAddress={self.address}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
                f"\n[Address]\nAddress={self.address6}/64\nDuplicateAddressDetection=none\n"
            ),
        }
        for name, content in files.items():
            path = top / name
            _folders(top, image, Path(name).parent)
            path.write_text(content)
            path.chmod(server.mode(name))
        (top / "root/.ssh").chmod(0o700)

    def _switch_on(self) -> None:
        (self.directory / "power-cycle").unlink(missing_ok=True)
        (self.directory / "cgroup").unlink(missing_ok=True)
        on = self.segment
        # Copies: a running shell reads its script on and on, and the next boot must not meet another version of it.
        for script in ("power.sh", "machine.sh"):
            server.remove(self.directory / script)
            shutil.copy(Path(__file__).with_name(script), self.directory / script)
        argv = ["sh", str(self.directory / "power.sh"), str(self.directory), self.name, self.namespace]
        argv += [on.bridge, on.veth(self.octet), on.mac(self.octet)]
        if tools.systemd_is_init():
            # systemd owns the cgroup tree there: it must be the one who hands us a branch of it.
            unit = f"{self.namespace}.service"
            run(["systemctl", "stop", unit], check=False)
            delegated = [
                "systemd-run",
                "--quiet",
                "--collect",
                f"--unit={unit}",
                "-p",
                "Delegate=yes",
                "-p",
                "TasksMax=infinity",
            ]
            run([*delegated, *argv, "own"])
        else:
            cgroup = _cgroup_root() / f"gpuwright-lab{on.number or ''}" / self.name
            with (self.directory / "power.log").open("ab") as log:
                subprocess.Popen(
                    [*argv, str(cgroup)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                )
        deadline = time.monotonic() + 10
        while not self._init():
            if time.monotonic() > deadline:
                raise LabError(
                    f"{self.name} could not be switched on; see {self.directory}/power.log and {self.directory}/console"
                )
            time.sleep(0.02)

    def _off_and_on(self, act: Callable[[], object]) -> None:
        if not self.running:
            raise LabError(f"{self.name} is off; switch it on with: gpuwright lab up --names {self.name}")
        before = self._init()
        act()
        deadline = time.monotonic() + _DOWN_LIMIT
        while self._init() in (0, before):
            if not self.running:
                raise LabError(f"{self.name} went off and stayed off; see {self.directory}/console")
            if time.monotonic() > deadline:
                raise LabError(f"{self.name} did not go down and come up within {_DOWN_LIMIT:.0f} s")
            time.sleep(0.05)
        self.wait()

    def _cgroup(self) -> Path:
        return _cgroup_of(self.directory)

    def _init(self) -> int:
        """Pid of its systemd on this machine, 0 while there is none."""
        try:
            pids = (self._cgroup() / "machine/payload/init.scope/cgroup.procs").read_text().split()
        except OSError:
            return 0
        return int(pids[0]) if pids else 0


def up(names: Sequence[str], release: str = "trixie", *, blank: bool = False) -> list[Host]:
    """Boot hosts, all at once; a host that is up stays as it is, one that is off boots with the disk it has.

    ``blank``: have them blank in any case. Raises LabError for a bad name, another release under the same name, or a
    host that does not boot.
    """
    server.check_names(names, "host")
    tools.need_root()
    tools.need({**tools.HOSTS, **tools.REGISTRY})
    make_private(state())
    server.make_key(state() / "key", "gpuwright-lab")
    with locked(state() / "lock"):
        segment = network.segment()
        proxy.start(segment)
        registry.start(segment)
        repository.resume()
        sweep(segment)
        hosts = [_known_or_new(name, release, segment) for name in names]
        _record_host_keys()
    off = [host for host in hosts if blank or not host.running]
    with step(f"Booting {', '.join(host.name for host in off)} ({release})") if off else nullcontext():
        for host in off:
            with host._alone():
                host.power_off()
                if blank or not (host.directory / "image").exists():
                    host._install()
                host._switch_on()
        for host in hosts:
            host.wait()
    return hosts


def known() -> list[Host]:
    """All hosts of this lab, running or not, by address."""
    segment = network.recorded()
    if segment is None:
        return []
    hosts = [Host(**record, segment=segment) for record in server.records("host")]
    return sorted(hosts, key=lambda host: host.octet)


def sweep(segment: Segment) -> None:
    """Clear what a killed run left: half-made hosts, processes without a supervisor, namespaces and cards of no host."""
    hosts = {host.name: host for host in known()}
    for directory in (state() / "hosts").glob("*"):
        if directory.name not in hosts:
            _kill(_cgroup_of(directory))
            server.remove(directory)
    for host in hosts.values():
        # Processes that nobody would boot again. A host between two boots has its power supply, and is left alone.
        if not host.running and _populated(host._cgroup()):
            host.power_off()
    branch = _cgroup_root() / f"gpuwright-lab{segment.number or ''}"
    for cgroup in branch.glob("*/"):
        if cgroup.name not in hosts:
            _kill(cgroup)
    for namespace in network.namespaces(segment):
        name = namespace.removeprefix(segment.namespace(""))
        if name not in hosts and name != "neighbour":
            run(["ip", "netns", "del", namespace], check=False)


def _known_or_new(name: str, release: str, segment: Segment) -> Host:
    hosts = known()
    for host in hosts:
        if host.name == name:
            if host.release != release:
                raise LabError(
                    f"{name} is a {host.release} host; for {release} choose another name, or: gpuwright lab down {name}"
                )
            return host
    taken = {host.octet for host in hosts}
    octet = next((octet for octet in _OCTETS if octet not in taken), None)
    if octet is None:
        raise LabError(f"the lab has {len(hosts)} hosts and no address left; free some with: gpuwright lab down NAME")
    host = Host(name=name, release=release, octet=octet, segment=segment)
    host._write_record()
    return host


def _folders(top: Path, image: Path, folder: Path) -> None:
    """Make a folder on the upper layer. There it hides the image's, so it needs the same mode and owner."""
    if folder != Path() and not (top / folder).is_dir():
        _folders(top, image, folder.parent)
        (top / folder).mkdir()
        if (image / folder).is_dir():
            shutil.copystat(image / folder, top / folder)


def _record_host_keys() -> None:
    lines = [host._host_key_line() for host in known()]
    draft = state() / ".known_hosts"
    draft.write_text("".join(lines))
    draft.replace(state() / "known_hosts")


def _cgroup_root() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split()
        if fields[2] == "cgroup2":
            return Path(fields[1])
    raise LabError(
        "no cgroup2 file system is mounted on this machine, and the lab's hosts need one: mount -t cgroup2 none /mnt"
    )


def _cgroup_of(directory: Path) -> Path:
    try:
        return Path((directory / "cgroup").read_text().strip())
    except FileNotFoundError:
        return directory / "has-never-been-on"


def _populated(cgroup: Path) -> bool:
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError:
        return False


def _kill(cgroup: Path) -> None:
    """End every process of a cgroup at once and remove it (cgroup.kill: Linux 5.14)."""
    if not cgroup.is_dir():
        return
    deadline = time.monotonic() + 10
    while _populated(cgroup):
        (cgroup / "cgroup.kill").write_text("1")
        time.sleep(0.02)
        if time.monotonic() > deadline:
            raise LabError(f"processes in {cgroup} do not die")
    for path, _, _ in os.walk(cgroup, topdown=False):
        try:
            Path(path).rmdir()
        except OSError:  # systemd removes a unit's own cgroup, at its own pace
            continue
