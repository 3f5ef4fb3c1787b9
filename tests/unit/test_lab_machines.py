"""What lab machines are made of, without booting one: QEMU's arguments, its control socket, names, and what the image holds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest

from lab import blank, machine_hardware, machine_image, machines, server
from lab.command import LabError
from lab.machine_hardware import KIND_TITLES, KINDS, arguments
from lab.qmp import Qmp
from roles import base, containers


def _devices(kind):
    argv = arguments(kind, [])
    devices = [argv[place + 1] for place, word in enumerate(argv) if word == "-device"]
    return [(device.split(",")[0], dict(part.split("=", 1) for part in device.split(",")[1:])) for device in devices]


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_hangs_on_a_bus_that_is_there(kind):
    buses = {"pcie.0"}
    for name, settings in _devices(kind):
        if name == "intel-iommu":
            continue
        assert settings["bus"] in buses
        if "id" in settings:
            buses.add(settings["id"])


@pytest.mark.parametrize("kind", KINDS)
def test_ports_have_slots_of_their_own_and_memory_adds_up(kind):
    slots = [settings["slot"] for _, settings in _devices(kind) if "slot" in settings]
    assert len(set(slots)) == len(slots)
    argv = arguments(kind, [])
    assert argv[argv.index("-m") + 1] == f"{sum(node.memory for node in KINDS[kind])}M"
    assert len([word for word in argv if word.startswith("node,nodeid=")]) == len(KINDS[kind])
    assert kind in KIND_TITLES


def test_one_kind_has_memory_without_processors_and_the_other_has_none():
    assert [bool(node.cpus) for node in KINDS["hbm"]] == [True, True, False]
    assert all(node.cpus and node.accelerators for node in KINDS["pairs"])


@pytest.mark.parametrize("kind", KINDS)
def test_disk_and_network_are_on_no_path_of_an_accelerator(kind):
    devices = _devices(kind)
    above = {settings["id"]: settings["bus"] for _, settings in devices if "id" in settings and "bus" in settings}

    def path(bus):
        return {bus} | (path(above[bus]) if bus in above else set())

    accelerators = set().union(*(path(settings["bus"]) for name, settings in devices if name == "virtio-rng-pci"))
    others = [path(settings["bus"]) for name, settings in devices if name in ("virtio-blk-pci", "virtio-net-pci")]
    assert len(others) == 2
    assert all(other & accelerators == {"pcie.0"} for other in others)


def test_the_provisioned_image_holds_what_roles_install():
    needed = {*base.PACKAGES, "systemd-timesyncd", *containers.PACKAGES["debian-13"], "curl", "jq", "openssl"}
    held = {*blank._PACKAGES, *machine_image._BOOT, *machine_image.VARIANTS["provisioned"]}
    assert needed <= held


def test_the_recipe_follows_files_and_variant(monkeypatch, tmp_path):
    before = machine_image.recipe("trixie", "blank")
    assert machine_image.recipe("trixie", "provisioned") != before
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/something").write_text("else")
    monkeypatch.setattr(machine_image, "_FILES", tmp_path)
    assert machine_image.recipe("trixie", "blank") != before


@pytest.mark.parametrize(
    "check, sentence",
    [
        (lambda: machine_image.check("buster", "blank"), "machines run trixie, bookworm, not 'buster'"),
        (
            lambda: machine_image.check("trixie", "full"),
            "image 'full' is not one the lab makes; allowed: blank, provisioned",
        ),
        (lambda: machine_hardware.check_kind("numa"), "kind 'numa' is not one the lab has; allowed: hbm, pairs"),
        (lambda: server.check_names(["A b"], "machine"), "'A b' is no machine name for the lab; allowed: a letter"),
        (lambda: server.check_names(["a", "a"], "machine"), "a machine is named twice: a, a"),
    ],
)
def test_bad_input_gets_one_sentence(check, sentence):
    with pytest.raises(LabError) as error:
        check()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_hosts_and_machines_share_their_names(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUWRIGHT_LAB_DIR", str(tmp_path))
    (tmp_path / "hosts/one").mkdir(parents=True)
    (tmp_path / "hosts/one/host.json").write_text("{}")
    with pytest.raises(LabError, match="one is a host of this lab; choose another name, or: gpuwright lab down one"):
        server.check_names(["one"], "machine")


@pytest.fixture
def qemu(tmp_path):
    """A control socket that answers as it is told to. A STAND-IN for QEMU's."""
    answers: list[list[dict]] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = tmp_path / "qmp"
    listener.bind(str(path))
    listener.listen(1)

    def serve():
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            stream.write('{"QMP": {}}\n')
            stream.flush()
            for line in stream:
                asked = json.loads(line)["execute"]
                said = [{"return": {}}] if asked == "qmp_capabilities" else answers.pop(0)
                stream.write("".join(json.dumps(one) + "\n" for one in said))
                stream.flush()
                if not answers and asked != "qmp_capabilities":
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield path, answers
    listener.close()


def test_an_answer_is_told_from_events(qemu):
    path, answers = qemu
    answers.append([{"event": "STOP"}, {"return": "kept"}])
    with Qmp(path) as qmp:
        assert qmp.command("query-name") == "kept"


def test_a_refusal_names_the_command(qemu):
    path, answers = qemu
    answers.append([{"error": {"class": "GenericError", "desc": "no such thing"}}])
    with Qmp(path) as qmp, pytest.raises(LabError, match="QEMU refused eject: no such thing"):
        qmp.command("eject")


def test_a_reboot_is_told_from_other_events(qemu):
    path, answers = qemu
    answers.append([{"return": {}}, {"event": "RTC_CHANGE"}, {"event": "SHUTDOWN", "data": {"reason": "guest-reset"}}])
    with Qmp(path) as qmp:
        qmp.command("send-key")
        assert qmp.wait_for("SHUTDOWN") == {"reason": "guest-reset"}


def test_waiting_for_an_event_ends_when_qemu_does(qemu):
    path, answers = qemu
    answers.append([{"return": {}}])
    with Qmp(path) as qmp:
        qmp.command("quit")
        with pytest.raises(LabError, match="QEMU ended while it was asked"):
            qmp.wait_for("SHUTDOWN")


def test_waiting_for_the_end_ends_with_it(qemu):
    path, answers = qemu
    answers.append([{"return": {}}, {"event": "SHUTDOWN", "data": {"reason": "guest-reset"}}])
    with Qmp(path) as qmp:
        qmp.command("send-key")
        qmp.wait_until_it_ends(5)


def test_a_machine_that_does_not_go_down_in_time_is_said(qemu):
    path, _ = qemu
    with Qmp(path) as qmp, pytest.raises(TimeoutError):
        qmp.wait_until_it_ends(0.05)


def test_nobody_there_is_one_sentence(tmp_path):
    with pytest.raises(LabError, match=r"QEMU does not answer on .*: No such file or directory"):
        Qmp(tmp_path / "qmp")


def test_what_is_killed_has_ended_and_its_ports_are_free(tmp_path):
    """A power cut and the next switching on: a QEMU of gigabytes was gone from /proc while it still had its ports."""
    listening = "import socket, time\nheld = bytearray(1 << 28)\nmine = socket.create_server(('127.0.0.1', 0))\nprint(mine.getsockname()[1], flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", listening], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        machines._kill([process.pid])
        assert process.poll() is not None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    machines._kill([process.pid])  # and again, of one that is gone
