"""Every unit that we ship takes its confinement from the one table, and what differs there is named with a reason."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from gpuwright import sandbox
from gpuwright.audit import confinement
from gpuwright.render import REPOSITORY
from gpuwright.spec.fleet import collect

UNITS = [
    path
    for room in ("files", "templates")
    for path in sorted((REPOSITORY / room).rglob("etc/systemd/system/*.service*"))
]
UNITS = [path for path in UNITS if path.is_file()]
KEYS = tuple(sandbox.BASE)


def test_every_unit_that_we_ship_has_a_row_on_the_page_and_every_row_a_unit():
    rows = [name for name, _ in runpy.run_path(str(REPOSITORY / "tests/lab/exposure.py"))["ROWS"]]
    shipped = []
    for path in UNITS:
        name = path.name.removesuffix(".j2")
        # one of each kind for every engine, image and model
        shipped.append(
            name if name.startswith("gpuwright-") else f"gpuwright-{name.removesuffix('.service')}-NAME.service"
        )
    assert sorted(rows) == sorted(shipped)


EVERY = [
    sandbox.guard(),
    sandbox.firewall(),
    sandbox.neighbour_guard(),
    sandbox.acs(),
    sandbox.p2p(),
    sandbox.gpu_faults(),
    sandbox.gpu_settings(),
    sandbox.driver_settle(),
    sandbox.image("one", None),
    sandbox.image("two", "/var/tmp/image.tar"),
    sandbox.engine("one", gpus=False, judged=False, drops_cache=False, weights="/srv/models"),
    sandbox.engine("two", gpus=True, judged=True, drops_cache=True, weights="/home/models"),
    sandbox.model("one", "/srv/models", None),
    sandbox.model("two", "/tmp/models", "/root/weights"),
    sandbox.verification("/srv/models"),
    sandbox.engine_guard(),
    sandbox.gateway(low_port=False),
    sandbox.gateway(low_port=True),
]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_its_confinement_from_the_table(path: Path) -> None:
    text = path.read_text()
    shared = text + "".join(
        (REPOSITORY / "templates" / name).read_text() for name in re.findall(r'include "([^"]+)"', text)
    )
    assert "{{ sandbox }}" in shared
    by_hand = [line for line in shared.splitlines() if line.partition("=")[0] in KEYS]
    assert by_hand == []


@pytest.mark.parametrize("confined", EVERY, ids=lambda confined: confined.unit)
def test_what_differs_is_known_different_and_explained(confined: sandbox.Confined) -> None:
    for deviation in confined.deviations:
        assert re.fullmatch(r"[A-Za-z].+\.", deviation.reason)
        for key, value in deviation.values.items():
            assert value != sandbox.BASE[key], f"{key} is the base table's own"
    keys = [key for deviation in confined.deviations for key in deviation.values]
    assert len(keys) == len(set(keys)), "one reason for each"
    written = [line.partition("=")[0] for line in confined.lines().splitlines() if not line.startswith("#")]
    assert set(written) | {"ReadWritePaths"} == set(confined.values) | {"ReadWritePaths"}
    said = re.sub(r"\n# ", " ", confined.lines())
    assert all(key in said.partition("Not set:")[2] for key in set(KEYS) - set(confined.values))
    assert max(map(len, confined.lines().splitlines())) <= 120


def test_units_without_settings_are_rendered_with_it() -> None:
    """Those of roles that are rendered nowhere else without a host."""
    from gpuwright import guard
    from gpuwright.spec.node import Hardware
    from roles import base, pcie
    from roles.pcie.spec import PcieSpec

    found = [*guard.files(), *base.recorder_files(), *pcie.role_files(PcieSpec(), Hardware())]
    units = [file.data.decode() for file in found if file.path.endswith(".service")]
    assert len(units) == 3
    assert all("SystemCallFilter=~@privileged\n" in unit for unit in units)


def test_a_path_in_a_home_or_among_temporary_files_is_seen() -> None:
    assert sandbox.model("one", "/srv/models", None).values["ProtectHome"] == "yes"
    assert sandbox.model("one", "/srv/models", "/home/alice/w").values["ProtectHome"] == "read-only"
    assert sandbox.model("one", "/srv/homes", "/homes/w").values["ProtectHome"] == "yes"
    assert sandbox.model("one", "/tmp", None).values["PrivateTmp"] == "no"
    assert sandbox.engine("one", False, False, False, "/root/models").values["ProtectHome"] == "read-only"


def test_every_unit_of_the_machines_that_ship_has_a_row(tmp_path: Path) -> None:
    nodes = sorted(file.stem for file in (REPOSITORY / "inventory/nodes").glob("*.yaml"))
    (tmp_path / "nodes").symlink_to(REPOSITORY / "inventory/nodes")
    inventory = tmp_path / "site.py"
    inventory.write_text(
        "from gpuwright.spec.fleet import fleet as _fleet\n"
        f"hosts = _fleet({{name: {{'node': name}} for name in {nodes}}}, __file__)\n"
    )
    specs = collect(inventory).specs
    assert len(specs) >= 8
    for spec in specs.values():
        rows = [confined.unit for confined in sandbox.of_node(spec)]
        assert len(rows) == len(set(rows))
        assert {f"gpuwright-engine-{name}.service" for name in (spec.engine.engines if spec.engine else ())} <= set(
            rows
        )
        assert {f"gpuwright-model-{name}.service" for name in (spec.models.items if spec.models else ())} <= set(rows)
        assert {"gpuwright-guard.service", "gpuwright-gpu-faults.service"} <= set(rows)


def test_system_calls_are_read_as_systemd_reads_them() -> None:
    """Against the real systemd of this machine, where it has one."""
    try:
        listed = subprocess.run(
            ["systemd-analyze", "--no-pager", "syscall-filter"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no systemd-analyze here")
    _, sets = confinement.SHOWN.parse(f"-- sets of system calls --\n{listed.stdout}")
    allowed = confinement._filter(sandbox.BASE["SystemCallFilter"], sets)
    assert {"read", "openat", "socket", "execve", "clone", "newfstatat"} <= allowed
    assert not {"mount", "chown", "setuid", "setrlimit", "bpf", "init_module", "reboot", "sethostname"} & allowed
    assert confinement._filter("@system-service ~@privileged ~@resources @chown", sets) - allowed == {
        "chown", "chown32", "fchown", "fchown32", "fchownat", "lchown", "lchown32"
    }  # fmt: skip
