"""An exchange of the driver by the script alone, with apt, dpkg, DKMS and the module as stand-ins: what is put in, verified, taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_driver_script import Node

OLD, NEW = "580.95.05", "595.58.03"
NAMES = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libnvidia-ml1")
UUIDS = ("GPU-a", "GPU-b")
STATE = "var/lib/gpuwright/nvidia"
CONF = (
    f"version={NEW}\npackages=(nvidia-driver-cuda nvidia-kernel-open-dkms)\nbuilt=yes\nfabric=auto\n"
    "fabric_manager=nvidia-fabricmanager\ncards=2\npersistence=no\n"
)

# "name version" a line is what is installed. A package's new version is the wanted one, or the one in a .deb's name.
APT = r"""
db={root}/db
echo "apt-get $*" >>{root}/calls
case " $* " in *" -s "*) exit 0 ;; *" update "*) exit 0 ;; *" download "*) exit 0 ;; *--download-only*) exit 0 ;; esac
status=0
for word in "$@"; do
  case $word in
    -*|install|DPkg*|Dpkg*|APT*) continue ;;
    *-) sed -i "/^${{word%-}} /d" $db; continue ;;
    */*.deb) name=${{word##*/}}; version=${{name#*_}}; version=${{version%.deb}}; name=${{name%%_*}} ;;
    *=*) name=${{word%%=*}}; version=${{word#*=}} ;;
    *) name=$word; version={wanted}-1 ;;
  esac
  sed -i "/^$name /d" $db; echo "$name $version" >>$db
  if [ $name = nvidia-kernel-open-dkms ] && [ "$version" = {wanted}-1 ] && [ -e {root}/does-not-build ]; then
    echo "Error! Bad return status for module build"; status=100
  fi
done
exit $status
"""
DPKG_QUERY = r"""
case "$*" in
  *"linux-image"*) exit 0 ;;
  *"*nvidia*"*) sed 's/^/installed /' {root}/db ;;
  *) for last; do :; done; line=$(grep "^$last " {root}/db) || exit 1; echo "installed ${{line#* }}" ;;
esac
"""
MODINFO = r"""
[ -e {root}/does-not-build ] && grep -q 'nvidia-kernel-open-dkms {wanted}' {root}/db && exit 1
case "$*" in *version*) sed -n 's/nvidia-kernel-open-dkms \(.*\)-1/\1/p' {root}/db ;; *signer*) echo x ;; esac
"""
MODPROBE = r"""
version=$(sed -n 's/nvidia-kernel-open-dkms \(.*\)-1/\1/p' {root}/db)
if [ -e {root}/finds-no-card ] && [ "$version" = {wanted} ]; then exit 1; fi
mkdir -p {root}/proc/driver/nvidia
echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $version  Release" >{root}/proc/driver/nvidia/version
"""
SMI = r"""
[ -e {root}/loses-a-card ] && grep -q {wanted} {root}/proc/driver/nvidia/version && {{ echo GPU-a; exit 0; }}
printf 'GPU-a\nGPU-b\n'
"""
SYSTEMCTL = r"""
echo "systemctl $*" >>{root}/calls
case "$*" in *list-unit-files*) echo "gpuwright-engine-main.service enabled" ;; *is-active*) exit 0 ;; *cat*) exit 1 ;; esac
exit 0
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.write("etc/gpuwright/nvidia/driver.conf", CONF)
    node.write("db", "".join(f"{name} {OLD}-1\n" for name in NAMES))
    node.write("lib/modules/6.12/modules.order", "")
    node.write("lib/modules/6.12/build/Makefile", "")
    node.write(f"{STATE}/cards", "".join(f"{index} {uuid} bus\n" for index, uuid in enumerate(UUIDS)))
    for name, text in {
        "apt-get": APT,
        "dpkg-query": DPKG_QUERY,
        "modinfo": MODINFO,
        "nvidia-modprobe": MODPROBE,
        "nvidia-smi": SMI,
        "systemctl": SYSTEMCTL,
        "dkms": "exit 1",
        "dpkg": "true",
        "journalctl": "true",
        "uname": "echo 6.12",
        "sleep": "true",
    }.items():
        node.program(name, text.format(root=tmp_path, wanted=NEW))
    load(node)
    return node


def load(node: Node) -> None:
    (node.path / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
    version = next(line.split()[1][:-2] for line in db(node) if line.startswith("nvidia-kernel"))
    node.write(
        "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release\n"
    )


def db(node: Node) -> list[str]:
    return sorted((node.path / "db").read_text().splitlines())


def of(version: str) -> list[str]:
    return sorted(f"{name} {version}-1" for name in NAMES)


def calls(node: Node) -> str:
    return (node.path / "calls").read_text()


def state(node: Node, name: str) -> str | None:
    file = node.path / STATE / name
    return file.read_text().strip() if file.exists() else None


def rebooted(node: Node, loads: bool = True) -> None:
    """Another boot: the module that is installed is loaded, or none is."""
    node.write(f"{STATE}/change/boot", "the boot before\n")
    (node.path / "proc/driver/nvidia/version").unlink()
    if loads:
        load(node)


def applied(node: Node) -> None:
    status, said = node.run("apply", "6.12")
    assert (status, db(node)) == (0, of(NEW)), said
    assert (state(node, "change/from"), state(node, "change/stage")) == (OLD, "applied")


def test_it_is_exchanged_verified_and_forgotten(node: Node) -> None:
    applied(node)
    assert node.run("outcome")[1].startswith(f"pending driver {NEW}")
    rebooted(node)
    status, _ = node.run("settle")
    assert status == 0
    assert node.run("outcome")[1] == f"good driver {NEW} is loaded and verified (before: {OLD})\n"
    assert state(node, "change/to") is None and state(node, "rejected") is None
    assert "reboot" not in calls(node)


def test_one_that_does_not_build_is_taken_back_before_the_reboot(node: Node) -> None:
    node.write("does-not-build", "")
    status, said = node.run("apply", "6.12")
    assert status == 1
    assert f"driver {NEW} was not installed" in said and f"{OLD} was put back" in said
    assert "Bad return status for module build" in said
    assert db(node) == of(OLD)
    assert state(node, "rejected").startswith(f"{NEW} ")
    assert state(node, "change/to") is None
    assert "systemctl start --no-block gpuwright-engine-main.service" in calls(node)
    [reason] = (node.path / "var/lib/gpuwright/evidence/driver").glob(f"*-{NEW}/reason")
    assert f"from={OLD}\nto={NEW}" in reason.read_text()


def test_one_that_finds_no_card_is_taken_back_without_a_second_reboot(node: Node) -> None:
    node.write("finds-no-card", "")
    applied(node)
    rebooted(node, loads=False)
    status, said = node.run("settle")
    assert status == 0, said
    assert db(node) == of(OLD)
    outcome = node.run("outcome")[1]
    assert outcome.startswith(f"failed driver {NEW} did not verify: no module is loaded")
    assert outcome.endswith(f"; {OLD} was put back and is verified\n")
    assert state(node, "rejected").startswith(f"{NEW} ")
    assert "systemctl reboot" not in calls(node)


def test_one_that_loses_a_card_takes_a_second_reboot(node: Node) -> None:
    node.write("loses-a-card", "")
    applied(node)
    rebooted(node)
    node.run("settle")
    assert "systemctl reboot" in calls(node)
    assert db(node) == of(OLD)
    assert node.run("outcome")[1].startswith("pending")
    rebooted(node)
    node.run("settle")
    outcome = node.run("outcome")[1]
    assert "1 cards answer instead of 2; card GPU-b does not answer" in outcome
    assert outcome.endswith(f"{OLD} was put back and is verified\n")
    assert calls(node).count("systemctl reboot") == 1


def test_neither_verifies_and_there_is_no_third_reboot(node: Node) -> None:
    node.program("nvidia-smi", "echo GPU-a")
    applied(node)
    rebooted(node)
    node.run("settle")
    rebooted(node)
    node.run("settle")
    assert "was put back and does not verify either" in node.run("outcome")[1]
    assert calls(node).count("systemctl reboot") == 1
    assert state(node, "change/to") is None, "engines start, and say themselves what they miss"


def test_power_that_went_in_between_is_no_fault_of_the_release(node: Node) -> None:
    applied(node)
    node.write(f"{STATE}/change/stage", "applying\n")
    node.write("db", f"{of(NEW)[0]}\n{of(OLD)[1]}\n{of(NEW)[2]}\n")
    rebooted(node, loads=False)
    node.run("settle")
    assert db(node) == of(OLD)
    assert "the power went while the packages were exchanged" in node.run("outcome")[1]
    assert state(node, "rejected") is None
    applied(node)


def test_a_run_that_comes_again_goes_on_from_the_first(node: Node) -> None:
    applied(node)
    applied(node)
    assert state(node, "change/packages").splitlines() == [f"{name}={OLD}-1" for name in NAMES]


def test_what_came_with_the_new_release_goes_with_it(node: Node) -> None:
    applied(node)
    (node.path / "db").open("a").write(f"libnvidia-new {NEW}-1\n")
    node.write("finds-no-card", "")
    rebooted(node, loads=False)
    node.run("settle")
    assert db(node) == of(OLD)


def test_packages_that_lie_ready_are_put_back_without_a_network(node: Node) -> None:
    for name in NAMES:
        node.write(f"{STATE}/previous/{name}_{OLD}-1.deb", "")
    node.write("finds-no-card", "")
    applied(node)
    rebooted(node, loads=False)
    node.run("settle")
    assert db(node) == of(OLD)
    assert f"{STATE}/previous/libnvidia-ml1_{OLD}-1.deb" in calls(node)


def test_evidence_never_fills_a_disk(node: Node) -> None:
    for number in range(9):
        node.write(f"var/lib/gpuwright/evidence/driver/2026010{number}T000000Z-1/reason", "")
    node.write("does-not-build", "")
    node.run("apply", "6.12")
    kept = sorted(folder.name for folder in (node.path / "var/lib/gpuwright/evidence/driver").iterdir())
    assert len(kept) == 5
    assert kept[-1].endswith(NEW)
