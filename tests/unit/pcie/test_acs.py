"""The script that clears ACS redirect, on a bus of files with a FAKE setpci."""

from __future__ import annotations

from p2p_node import Node

from gpuwright import units
from gpuwright.spec.node import Accelerators, Hardware
from roles import pcie as role
from roles.pcie.spec import PcieSpec


def test_only_bridges_above_accelerators_are_cleared_and_every_word_is_said(bus):
    done = bus.clear()
    assert done.returncode == 0, done.stdout
    assert [bus.word(a) for a in ("00:01.0", "11:00.0", "11:04.0", "00:02.0")] == [0x11, 0x11, 0x51, 0x11]
    # Beside the paths: an empty slot, another root port, a card with ACS of its own.
    assert [bus.word(a) for a in ("11:08.0", "00:03.0", "30:00.0")] == [0x1D, 0x1D, 0x1D]
    assert done.stdout.splitlines() == [
        "3 accelerators (10de, class 0300 0302), bridges above them: 0000:11:00.0 0000:10:00.0 0000:00:01.0 0000:11:04.0 0000:00:02.0",
        "0000:11:00.0: 0x001d before, 0x0011 after",
        "0000:10:00.0: no ACS, nothing to clear",
        "0000:00:01.0: 0x001d before, 0x0011 after",
        "0000:11:04.0: 0x005d before, 0x0051 after",
        "0000:00:02.0: 0x0011, nothing to clear",
    ]
    assert (bus.root / "run/gpuwright/pcie/acs-watched").exists()


def test_a_second_run_writes_nothing(bus):
    bus.clear()
    written = bus.written()
    assert bus.clear().returncode == 0
    assert bus.written() == written


def test_a_bit_that_stays_fails_after_everything_else_was_done(bus):
    (bus.fake / "0000:11:00.0.locked").touch()
    done = bus.clear()
    assert done.returncode == 1
    assert "0000:11:00.0: 0x001d before, 0x001d after" in done.stdout
    assert bus.word("11:04.0") == 0x51
    assert "firmware that locks ACS" in done.stdout.splitlines()[-1]


def test_a_bridge_that_cannot_be_read_is_no_success(bus):
    (bus.fake / "0000:11:00.0").write_text("ffff\n")
    done = bus.clear()
    assert done.returncode == 1
    assert "0000:11:00.0: its ACS control word cannot be read (silent)" in done.stdout
    assert "0000:11:00.0" not in bus.written()


def test_without_setpci_every_bridge_is_named(bus):
    (bus.bin / "setpci").unlink()
    done = bus.clear()
    assert (done.returncode, done.stdout.count("cannot be read (tool)")) == (1, 5)


def test_guests_stop_it_unless_they_are_accepted(bus):
    bus.add("00:02.0/20:00.1", "0200", driver="vfio-pci")
    done = bus.clear()
    assert (done.returncode, bus.written()) == (78, [])
    assert "0000:20:00.1" in done.stdout
    bus.configure(accepted="the guest is ours")
    assert bus.clear().returncode == 0


def test_stand_ins_are_found_as_the_settings_name_them(bus):
    bus.configure(vendor="15b3", classes=("0200",))
    done = bus.clear()
    assert (done.returncode, bus.written()) == (0, ["0000:00:03.0"])
    assert [bus.word(a) for a in ("00:03.0", "00:01.0", "30:00.0")] == [0x11, 0x1D, 0x1D]


def test_no_accelerator_is_said(bus):
    bus.configure(vendor="1002")
    done = bus.clear()
    assert (done.returncode, done.stdout) == (0, "0 accelerators (1002, class 0300 0302), bridges above them: none\n")


def test_virtual_functions_are_no_accelerators(bus):
    bus.add("00:03.0/30:00.1", "0302", vendor="10de", physfn="0000:30:00.0")
    assert bus.clear().stdout.startswith("3 accelerators")
    assert bus.word("00:03.0") == 0x1D


def test_without_settings_nothing_is_guessed(bus):
    (bus.root / "etc/gpuwright/pcie/acs.conf").unlink()
    done = bus.clear()
    assert (done.returncode, bus.written()) == (78, [])


def test_the_rule_names_the_accelerators():
    hardware = Hardware(accelerators=Accelerators(vendor="1b36", classes=("00ff", "0302")))
    (rules,) = [file for file in role.role_files(PcieSpec(), hardware) if file.path == role.RULES]
    text = rules.data.decode()
    assert 'ATTR{vendor}=="0x1b36", ATTR{class}=="0x00ff*|0x0302*"' in text


def test_the_unit_runs_once_a_boot_and_before_whatever_may_start_a_container():
    [unit] = [file.data.decode() for file in role.role_files(PcieSpec(), Hardware()) if file.path.endswith(role.UNIT)]
    assert units.lint(role.UNIT, unit) == []
    lines = unit.splitlines()
    for line in ("Before=docker.service", "Type=oneshot", "RemainAfterExit=yes", "WantedBy=multi-user.target"):
        assert line in lines
    # Before Docker means nothing where Docker has to be there first.
    assert not any(line.startswith(("After=", "Wants=", "Requires=")) for line in lines)


def test_p2p_is_judged_with_the_bridges_as_engines_find_them(tmp_path):
    node = Node(tmp_path / "node")
    lines = (node.root / "etc/systemd/system/gpuwright-p2p.service").read_text().splitlines()
    [after] = [line.removeprefix("After=").split() for line in lines if line.startswith("After=")]
    assert {"docker.service", "gpuwright-acs.service"} <= set(after)


def test_where_redirect_is_kept_the_role_has_no_file():
    assert role.role_files(PcieSpec(acs_redirect="kept"), Hardware()) == []


def test_every_file_names_its_owner():
    for file in role.role_files(PcieSpec(), Hardware()):
        assert "Owned by gpuwright, role pcie." in "".join(file.data.decode().splitlines(keepends=True)[:2]), file.path
