"""Lab machines: virtual machines that boot their own kernel through firmware and GRUB (DESIGN section 6).

A machine is a directory: ``machine.json`` what it is, ``disk.qcow2`` and ``firmware.qcow2`` what its disk and its firmware remember over
the shared image, ``console`` what it printed, ``qmp`` QEMU's control socket. Whether it runs is read from the kernel: QEMU and its
power supply are the processes that work in its directory, so that a killed run leaves nothing unknown.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from lab import (
    clock,
    machine_hardware,
    machine_image,
    machine_power,
    network,
    proxy,
    registry,
    repository,
    server,
    tools,
)
from lab.command import LabError, run
from lab.network import Segment
from lab.paths import locked, make_private, state
from lab.progress import step
from lab.qmp import Qmp
from lab.server import Server

# Forwarded ports of all labs, below what Linux hands out to connections by itself (from 32768 on).
_FIRST_PORT, _PORTS = 22000, 64
_SERVED = (443,)  # what a node serves, reached from here as from its network
_SNAPSHOT = "blank"
_HARDWARE, _IMAGE = "hbm", "provisioned"  # of a new machine
_DOWN_LIMIT = 300.0  # seconds; systemd's whole stop timeout twice, under emulation
# QEMU's own network: the machine's card and the gateway that reaches this machine (QEMU, "Using the user mode network stack").
_CARD, _GATEWAY = "10.0.2.15", "10.0.2.2"


@dataclass(frozen=True)
class Machine(Server):
    """A throwaway virtual machine. Everything it does not remember here, it forgets at ``reset``."""

    kind = "machine"
    boot_limit = 600.0  # a minute on two idle cores under emulation; five where they are shared
    patience = 30

    hardware: str  # a key of machine_hardware.KINDS
    image: str  # a key of machine_image.VARIANTS
    ssh_port: int  # on its address

    @property
    def address(self) -> str:
        """One of this machine's loopback addresses, of its own: its gateway has the port there that it has on the network."""
        return f"127.83.{self.segment.number}.{self.ssh_port - _first_port(self.segment) + 1}"

    @property
    def port(self) -> int:
        return self.ssh_port

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def running(self) -> bool:
        """Whether it is switched on: it is up, booting or rebooting."""
        return bool(_processes().get(self.directory))

    def reboot(self) -> None:
        """Press Ctrl-Alt-Delete, which systemd takes for ``systemctl reboot``; returns when it is up again, disk kept."""
        self._must_run()
        with Qmp(self.directory / "qmp") as qmp:
            qmp.command("send-key", keys=[{"type": "qcode", "data": key} for key in ("ctrl", "alt", "delete")])
            try:
                qmp.wait_until_it_ends(_DOWN_LIMIT)
            except TimeoutError:
                raise LabError(
                    f"{self.name} did not go down within {_DOWN_LIMIT:.0f} s: {self._last_words()}"
                ) from None
        self.wait()

    def power_cycle(self) -> None:
        """Cut the power in the middle of everything and switch it on again: memory is gone, what reached the disk stays."""
        self._must_run()
        self.power_off()
        self.switch_on()
        self.wait()

    def power_off(self) -> None:
        """Cut its power now: QEMU is killed. Nothing happens when it is off."""
        while pids := _processes().get(self.directory):
            _kill(pids)
            time.sleep(0.05)

    def switch_on(self) -> None:
        """Switch it on with the disk it has; returns at once, ``wait`` waits until it has booted."""
        _start(self)

    def reset(self) -> None:
        """Make it blank again: everything on its disk is gone, name, port and host key stay.

        Seconds: it goes on from a snapshot of its first boot, boot id included. Without one (another image, another QEMU) it
        gets a new disk and boots.
        """
        with step(f"Resetting {self.name}"), self._alone():
            self._make_blank()

    def _make_blank(self) -> None:
        self.power_off()
        if self._go_back():
            return
        self._install()
        self.switch_on()
        self.wait()
        self._remember()

    def _remember(self) -> None:
        """Keep memory, disk and firmware as they are now, to go back to."""
        self.run("sync")
        with Qmp(self.directory / "qmp", timeout=120) as qmp:
            said = qmp.monitor(f"savevm {_SNAPSHOT}")
        if said:
            raise LabError(f"QEMU made no snapshot of {self.name}: {said}")
        (self.directory / "snapshot").write_text(self._snapshot_of())

    def _go_back(self) -> bool:
        """Switch it on as it was when remembered; False when it is not remembered as what it is now."""
        remembered = self.directory / "snapshot"
        if not remembered.exists() or remembered.read_text() != self._snapshot_of():
            return False
        try:
            _start(self, "-loadvm", _SNAPSHOT)
            # It believes that it is still then, and its random numbers would be those of every other time it went back.
            with Path("/dev/urandom").open("rb") as chance:
                self.run(f"date -s @{time.time():.0f} && cat > /dev/urandom", stdin=chance.read(64).hex())
        except LabError:
            self.power_off()
            remembered.unlink()
            return False
        self.wait()
        return True

    def _snapshot_of(self) -> str:
        """What a snapshot depends on: the disk below, and the very machine that QEMU makes."""
        image = machine_image.image(self.release, self.image, self.segment)
        version = run([machine_hardware.QEMU, "--version"]).stdout.splitlines()[0]
        return "\n".join([str(image), version, *self._argv()]) + "\n"

    def destroy(self) -> None:
        """Take it away for good."""
        with self._alone():
            self.power_off()
            gone = self.directory.with_name(f".gone-{uuid.uuid4().hex}")
            with locked(state() / "lock"):
                self._record().unlink()
                self.directory.rename(gone)
            server.remove(gone)

    def _powered(self) -> bool:
        return self.running

    def _must_run(self) -> None:
        if not self.running:
            raise LabError(f"{self.name} is off; switch it on with: gpuwright lab up --machine {self.name}")

    def _last_words(self) -> str:
        return " | ".join(self.console().strip().splitlines()[-4:]) or "nothing on its console"

    def _install(self) -> None:
        """Give it a blank disk: the shared image below, and a seed with what makes this machine this one."""
        image = machine_image.image(self.release, self.image, self.segment)
        for name in ("disk.qcow2", "firmware.qcow2", "console", "snapshot"):
            (self.directory / name).unlink(missing_ok=True)
        self._write_seed(self.directory / "seed.tar")
        firmware = machine_hardware.firmware_variables()
        run(["qemu-img", "convert", "-O", "qcow2", str(firmware), str(self.directory / "firmware.qcow2")])
        run(
            [
                "qemu-img",
                "create",
                "-q",
                "-f",
                "qcow2",
                "-F",
                "raw",
                "-b",
                str(image),
                str(self.directory / "disk.qcow2"),
            ]
        )

    def _argv(self) -> list[str]:
        """QEMU's command line; paths are below its directory, where it works."""
        # ssh has a high port: where this machine's own sshd listens on every address, 22 is taken on this one, too.
        ports = {self.ssh_port: 22, **{port: port for port in _SERVED}}
        forward = ",".join(f"hostfwd=tcp:{self.address}:{outside}-:{inside}" for outside, inside in ports.items())
        return [
            *(machine_hardware.QEMU, "-name", f"{self.segment.namespace(self.name)}"),
            *machine_hardware.arguments(self.hardware, machine_hardware.acceleration()),
            # unsafe: nothing waits for this machine's own disk. A cut of the machine's power loses its memory, not ours, and
            # QEMU still hands every flushed block to the kernel.
            *("-drive", "if=none,id=disk,format=qcow2,file=disk.qcow2,cache=unsafe,discard=unmap"),
            *("-netdev", f"user,id=net,{forward}"),
            *("-object", "rng-random,id=entropy,filename=/dev/urandom"),
            *("-fw_cfg", "name=opt/gpuwright/seed,file=seed.tar"),
            *("-chardev", "file,id=serial,path=console,append=on", "-serial", "chardev:serial"),
            *("-qmp", "unix:qmp,server=on,wait=off"),
            *machine_power.OPTIONS,
        ]

    def _write_seed(self, path: Path) -> None:
        networks = self.segment.network
        files = {
            **self._identity(),
            "etc/hosts": self._names(_CARD),
            # Its card alone: every link of type ether would be Docker's, too, and taken off its bridge.
            # No default route: the lab's proxy, registry and hub are all there is, as for hosts.
            "etc/systemd/network/10-lab.network": (
                f"[Match]\nDriver=virtio_net\n\n[Network]\nAddress={_CARD}/24\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n\n"
                f"[Route]\nDestination={networks}\nGateway={_GATEWAY}\n"
            ),
            "etc/gpuwright-lab-machine": f"{self.hardware} {self.image}\n",
        }
        with tarfile.open(path, "w") as seed:
            for name, content in files.items():
                if name.startswith("root/.ssh/"):
                    folder = tarfile.TarInfo("root/.ssh")
                    folder.type, folder.mode = tarfile.DIRTYPE, 0o700
                    seed.addfile(folder)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.mtime = len(content.encode()), server.mode(name), int(time.time())
                seed.addfile(entry, io.BytesIO(content.encode()))


def up(
    names: Sequence[str],
    hardware: str | None = None,
    image: str | None = None,
    release: str = "trixie",
    *,
    blank: bool = False,
) -> list[Machine]:
    """Boot machines, one after the other; one that is up stays as it is, one that is off boots with the disk it has.

    ``hardware``: a key of `machine_hardware.KINDS`; None is what the machine has, "hbm" for a new one. ``image``: a key of
    `machine_image.VARIANTS`; None is what it has, "provisioned" for a new one. ``blank``: have them with a new disk in any case.
    Raises LabError for a bad name, something else under the same name, or a machine that does not boot.
    """
    server.check_names(names, "machine")
    machine_hardware.check_kind(hardware or _HARDWARE)
    machine_image.check(release, image or _IMAGE)
    tools.need_root()
    tools.need({**tools.HOSTS, **tools.REGISTRY, **tools.MACHINES})
    tools.need_files(tools.MACHINE_FILES)
    make_private(state())
    server.make_key(state() / "key", "gpuwright-lab")
    with locked(state() / "lock"):
        segment = network.segment()
        proxy.start(segment)
        registry.start(segment)
        repository.resume()
        clock.start(segment)
        sweep()
        machines = [_known_or_new(name, hardware, image, release, segment) for name in names]
    for machine in machines:
        with machine._alone():
            new = blank or not (machine.directory / "disk.qcow2").exists()
            off = new or not machine.running
            with step(f"Booting {machine.name} ({machine.release}, {machine.hardware})") if off else nullcontext():
                if new:
                    machine._make_blank()
                elif off:
                    machine.switch_on()
                machine.wait()
    return machines


def known() -> list[Machine]:
    """All machines of this lab, running or not, by port."""
    segment = network.recorded()
    if segment is None:
        return []
    machines = [Machine(**record, segment=segment) for record in server.records("machine")]
    return sorted(machines, key=lambda machine: machine.ssh_port)


def sweep() -> None:
    """Clear what a killed run left: half-made machines, and QEMUs of machines that are no more."""
    names = {machine.name for machine in known()}
    for directory, pids in _processes().items():
        if directory.parent == _home() and directory.name not in names:
            _kill(pids)
    for directory in _home().glob("*"):
        if directory.name not in names:
            server.remove(directory)


def _home() -> Path:
    return state() / "machines"


def _processes() -> dict[Path, list[int]]:
    """Every QEMU on this machine and every power supply, supplies first, by the directory they work in. A removed directory keeps its path."""
    supplies: dict[Path, list[int]] = {}
    emulators: dict[Path, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "exe").readlink().name.startswith("qemu-system-"):
                kind = emulators
            elif b"lab.machine_power" in (process / "cmdline").read_bytes().split(b"\0"):
                kind = supplies
            else:
                continue
            place = str((process / "cwd").readlink()).removesuffix(" (deleted)")
            kind.setdefault(Path(place), []).append(int(process.name))
        except OSError:  # it has ended, or is a kernel thread
            continue
    return {place: supplies.get(place, []) + emulators.get(place, []) for place in {*supplies, *emulators}}


def _kill(pids: Sequence[int]) -> None:
    """Kill these processes and wait for their end: the kernel frees a big one's memory first and its ports long after that."""
    ends = []
    for pid in pids:
        with suppress(ProcessLookupError):  # a power supply ends with its QEMU, and the other way round
            ends.append(os.pidfd_open(pid))
            signal.pidfd_send_signal(ends[-1], signal.SIGKILL)
    for end in ends:
        select.select([end], [], [])
        os.close(end)


def _start(machine: Machine, *more: str) -> None:
    for port in (machine.ssh_port, *_SERVED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((machine.address, port))
            except OSError:
                raise LabError(
                    f"port {port} on {machine.address} is taken by another program, and {machine.name} needs it (ss -ltnp)"
                ) from None
    (machine.directory / "power.json").write_text(json.dumps({"argv": machine._argv(), "first": more}))
    # runpy warns that the package has the module already; that would stand before what QEMU says.
    argv = [sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "lab.machine_power", "power.json"]
    # This very code, wherever it was started from.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with (machine.directory / "qemu.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=machine.directory,
            env=environment,
        )
    deadline = time.monotonic() + 20
    while True:
        if process.poll() is not None:
            words = (machine.directory / "qemu.log").read_text(errors="replace").strip().splitlines()[-3:]
            raise LabError(f"{machine.name} could not be switched on: {' | '.join(words) or 'QEMU said nothing'}")
        try:
            Qmp(machine.directory / "qmp").__exit__(None, None, None)
            return
        except LabError:
            if time.monotonic() > deadline:
                machine.power_off()
                raise
        time.sleep(0.05)


def _first_port(segment: Segment) -> int:
    return _FIRST_PORT + segment.number * _PORTS


def _known_or_new(name: str, hardware: str | None, image: str | None, release: str, segment: Segment) -> Machine:
    machines = known()
    for machine in machines:
        if machine.name == name:
            has = (machine.hardware, machine.image, machine.release)
            if has != (hardware or has[0], image or has[1], release):
                raise LabError(
                    f"{name} is a machine of kind {has[0]} with the {has[1]} image of {has[2]}; "
                    f"for another choose another name, or: gpuwright lab down {name}"
                )
            machine.known_hosts.write_text(machine._host_key_line())
            return machine
    taken = {machine.ssh_port for machine in machines}
    first = _first_port(segment)
    port = next((port for port in range(first, first + _PORTS) if port not in taken), None)
    if port is None:
        raise LabError(
            f"the lab has {len(machines)} machines and no port left; free some with: gpuwright lab down NAME"
        )
    machine = Machine(name, release, segment, hardware or _HARDWARE, image or _IMAGE, port)
    machine._write_record()
    machine.known_hosts.write_text(machine._host_key_line())
    return machine
