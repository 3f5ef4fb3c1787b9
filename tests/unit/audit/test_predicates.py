"""Each predicate on a recorded answer: green as it is, and exactly one control red when one thing in it is changed.

The answers are of a converged lab host, with what changes from machine to machine taken out. What only a machine can
show (a clock, HBM, GPUs, controllers of memory) is shown here.
"""

import base64
import datetime
import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml

from gpuwright.audit import controls, privileged
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge_all
from gpuwright.ingress import ingress
from gpuwright.snapshot import Snapshot
from gpuwright.spec.fleet import collect
from gpuwright.upstreams import upstreams
from roles.access import keys as authorized_keys
from roles.access.spec import AccessSpec
from roles.containers.gpus.facts import PACKAGES as TOOLKIT_PACKAGES
from roles.containers.gpus.spec import ToolkitSpec
from roles.engine import container, model_directory
from roles.firewall import table
from roles.gateway import engine_guard, keys
from roles.gateway.caddyfile import configuration
from roles.memory.spec import MemorySpec
from roles.pcie.p2p_spec import P2pSpec
from roles.pcie.spec import PcieSpec

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
RECORDED = {name: "\n".join(lines) for name, lines in json.loads((HERE / "recorded.json").read_text()).items()}

COMMIT, DIGEST = "c0ffee" * 6 + "c0ff", "sha256:" + "d1" * 32


def gpus(cdi="/run/cdi/nvidia.yaml", driver="580.95.05", version="1.18.2-1", want="hold", path="active"):
    """What a host with two cards says of them (section containers-gpus), in the form of its script."""
    cards = [f"GPU-0000000{number}-0000-0000-0000-000000000000" for number in range(2)]
    said = {
        "module": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
        "cards": "\n".join(cards),
        "packages": "\n".join(f"{want} installed {name} {version}" for name in TOOLKIT_PACKAGES),
        "toolkit": "NVIDIA Container Toolkit CLI version 1.18.2",
        "cdi": "\n".join([cdi, "K kind: nvidia.com/gpu", *(f'N - name: "{uuid}' for uuid in cards), f"L .so.{driver}"]),
        "units": "\n\n".join(
            f"Id=nvidia-cdi-refresh.{kind}\nLoadState=loaded\nUnitFileState=enabled\nActiveState={state}\nResult=success"
            for kind, state in (("service", "inactive"), ("path", path))
        ),
    }
    return "\n".join(f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in said.items())


RECORDED |= {
    "containers-gpus": gpus(),
    "audit-docker-gpus": '{"version":"26.1.5","folders":["/etc/cdi","/var/run/cdi"],"runtime":"runc"}',
    "audit-gpus-inside": json.dumps(
        {
            "name": "gpuwright-main",
            "engine": "main",
            "status": 0,
            "answer": "GPU 0: a card (UUID: GPU-00000000-0000-0000-0000-000000000000)",
            "requests": [{"driver": "cdi", "ids": ["nvidia.com/gpu=GPU-00000000-0000-0000-0000-000000000000"]}],
        }
    ),
}
DEPLOY_KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}B deploy"
AUDIT_KEY = f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 42}C audit"
INVENTORY = """
from gpuwright.spec.fleet import fleet as _fleet
nodes = _fleet({{"n": {{"node": "lab", "set": {settings!r}}}}}, __file__, pins={pins!r})
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """The lab's node file with the recorded host's digests, and a Caddy and a file of keys of its own."""
    directory = tmp_path_factory.mktemp("node")
    (directory / "nodes").mkdir()
    (directory / "nodes/lab.yaml").write_text((REPOSITORY / "inventory/nodes/lab.yaml").read_text())
    (directory / "caddy").write_text("a stand-in for the binary")
    key = {"created": datetime.date(2026, 11, 29), "hash": "$2b$04$" + "a" * 53}
    (directory / "keys.yaml").write_text(yaml.safe_dump({"keys": {"tester-0001": key}}))
    settings = {
        "base.unattended_upgrades": True,
        "models.numa_nodes": "0",
        "firewall.ssh": ["10.83.0.0/24"],
        "firewall.gateway": ["0.0.0.0/0", "::/0"],
        "gateway.caddy.file": str(directory / "caddy"),
        "gateway.keys_file": str(directory / "keys.yaml"),
        "gateway.local_clients": {},
    }
    pins = {"images": {"registry.lab:5000/sim:lab": DIGEST}, "models": {"lab/tiny@main": COMMIT}}
    (directory / "inventory.py").write_text(INVENTORY.format(settings=settings, pins=pins))
    collected = collect(directory / "inventory.py")
    assert not collected.faults, collected.faults
    # Roles of machines: a lab host is a container, whose kernel and memory are its machine's.
    described = collected.specs["n"]
    gpus = described.hardware.gpus.model_copy(update={"memory": 96 * 1024**3})
    accelerators = described.hardware.accelerators.model_copy(update={"count": 2})
    hardware = described.hardware.model_copy(
        update={"hbm_numa_nodes": (1,), "gpus": gpus, "accelerators": accelerators}
    )
    # Deployed by an account with sudo: in the lab's own node file it is root.
    access = AccessSpec.model_validate(
        {
            "users": {
                "deploy": {"keys": [DEPLOY_KEY], "sudo": "all"},
                "auditor": {"keys": [AUDIT_KEY], "sudo": "audit"},
            },
            "banner": "For authorised use only.",
        }
    )
    return described.model_copy(
        update={
            "hardware": hardware,
            "memory": MemorySpec(),
            "pcie": PcieSpec(),
            "access": access,
            "hardening": "server-cis1",
        }
    )


@pytest.fixture(scope="module")
def answers(spec):
    """The recorded answers, with what the node file comes to put in."""
    engine = spec.engine.engines["main"]
    config = container.configuration("main", engine, model_directory(engine.model, spec.models))
    accepted = keys.accepted(keys.load(Path(spec.gateway.keys_file)), None)
    identity = configuration(spec.gateway, upstreams(spec.engine), accepted, hashlib.sha256(b"").digest()).identity
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=11)
    values = {
        "@CONFIG@": config,
        "@ENGINE_GUARD@": hashlib.sha256(engine_guard.rules(upstreams(spec.engine))).hexdigest(),
        "@RULES@": hashlib.sha256(table.rules(spec.firewall, ingress(spec))).hexdigest(),
        "@IDENTITY@": identity,
        "@CADDY@": hashlib.sha256(Path(spec.gateway.caddy.file).read_bytes()).hexdigest(),
        "@DEPLOY_KEY@": authorized_keys.parse(DEPLOY_KEY).fingerprint,
        "@AUDIT_KEY@": authorized_keys.parse(AUDIT_KEY).fingerprint,
        "@AUDIT_SCRIPT@": privileged.digest(spec),
        "@EXPIRES@": f"{expires:%b %d %H:%M:%S %Y GMT}",
    }
    found = dict(RECORDED)
    for name, text in found.items():
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        found[name] = text
    return found


def outcomes(answers, spec):
    results = judge_all(controls.of_node(spec), Snapshot({name: (0, text) for name, text in answers.items()}), spec)
    return {result.control.id: result for result in results}


@pytest.fixture(scope="module")
def green(answers, spec):
    return outcomes(answers, spec)


# What arises only between the GPUs of one engine; its controls are judged on a node file whose engine has two.
OF_SEVERAL_GPUS = {"GPW-ENGN-033", "GPW-PCIE-009", "GPW-PCIE-010"}


# What arises only where containers are given GPUs; judged on a node file that gives the machine two.
WITH_GPUS = {f"GPW-CONT-{number:03}" for number in range(19, 28)}


def with_cards(spec):
    gpus = spec.hardware.gpus.model_copy(update={"count": 2})
    containers = spec.containers.model_copy(update={"toolkit": ToolkitSpec(source="local", version="1.18.2")})
    return spec.model_copy(
        update={"hardware": spec.hardware.model_copy(update={"gpus": gpus}), "containers": containers}
    )


def with_two_gpus(spec):
    engine = spec.engine.engines["main"].model_copy(update={"gpus": (0, 1)})
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"engines": {"main": engine}})})


NOT_HERE = {"GPW-BASE-003", "GPW-BASE-020", "GPW-ENGN-030", "GPW-ENGN-032"} | {
    f"GPW-MEMO-{number:03}" for number in (1, 2, 4, 5)
}
NOT_HERE |= {f"GPW-PCIE-{number:03}" for number in range(1, 9)}
NOT_HERE |= OF_SEVERAL_GPUS | WITH_GPUS

# What a container cannot say of its machine's kernel.
CANNOT_TELL = {f"GPW-BASE-{number:03}" for number in range(23, 27)}


def test_the_recorded_host_keeps_every_promise(green):
    arising = (Outcome.PASS, Outcome.NOT_APPLICABLE)
    wrong = {key: r.verdict.actual for key, r in green.items() if r.outcome not in arising and key not in CANNOT_TELL}
    assert wrong == {}
    assert {key for key, r in green.items() if r.outcome is Outcome.MANUAL} == CANNOT_TELL
    assert {key for key, r in green.items() if r.outcome is Outcome.NOT_APPLICABLE} == NOT_HERE


# control: changes as (section, regular expression, replacement); the first that arises on machines only comes first, as
# what makes it arise.
_BARE = ("system", "VIRTUALIZATION=.*", "VIRTUALIZATION=none")
_P2P = ("p2p-verdicts", r"\Z", "main\tgood\tevery copy and every all-reduce was right")
_HBM = [
    ("numa", "online 0\nhas_memory 0", "online 0-1\nhas_memory 0-1"),
    ("numa", "end", "node 1||268435456|1024|0\nend"),
]
MACHINE = {
    "GPW-BASE-003": [("system", "VIRTUALIZATION=.*", "VIRTUALIZATION=none"), ("audit-base-clock", "no", "yes")],
    **{f"GPW-BASE-{number:03}": [_BARE, ("audit-base-clock", "no", "yes")] for number in (20, 23, 24, 25, 26)},
    "GPW-ENGN-030": [
        ("audit-engine-controllers", '"pids":false,"memory":false', '"pids":true,"memory":true'),
        ("audit-containers", '"pids_limit":0', '"pids_limit":8192'),
    ],
    "GPW-ENGN-032": _HBM,
    **{f"GPW-PCIE-{number:03}": [_BARE] for number in range(1, 9)},
    "GPW-ENGN-033": [_P2P],
    "GPW-PCIE-009": [_P2P],
    "GPW-PCIE-010": [
        (
            "audit-p2p-files",
            r"\Z",
            "755 root root /var/lib/gpuwright/pcie/p2p\n644 root root /var/lib/gpuwright/pcie/p2p/main.json",
        )
    ],
    "GPW-MEMO-001": [_BARE, *_HBM],
    "GPW-MEMO-002": [_BARE, ("memory", "zone_reclaim=0", "zone_reclaim=1")],
    "GPW-MEMO-004": [_BARE],
    "GPW-MEMO-005": [_BARE, *_HBM, ("audit-memory-engines", "Mems_allowed_list: 0", "Mems_allowed_list: 0-1")],
}

DOCTORED = {
    "GPW-BASE-001": [("audit-base-journal", "open /var/log", "open /run/log")],
    "GPW-BASE-002": [("audit-base-journal", "cap 268435456", "cap 4294967296")],
    "GPW-BASE-003": [("audit-base-clock", "yes", "no")],
    "GPW-BASE-004": [("audit-base-upgrades", "every 1", "every 0")],
    "GPW-BASE-005": [("audit-base-upgrades", "blocked .linux-image\n", "")],
    "GPW-BASE-006": [("audit-base-needrestart", "l", "a")],
    "GPW-BASE-007": [("system", "REBOOT=no", "REBOOT=yes")],
    "GPW-BASE-008": [("audit-base-accounts", "uid 0 root", "uid 0 root\nuid 0 toor")],
    "GPW-BASE-009": [("audit-base-accounts", r"\Z", "\nblank guest")],
    "GPW-BASE-010": [("audit-base-accounts", "uid 2 bin", "uid 1 bin")],
    "GPW-BASE-011": [("owned", "S 644 root root /etc/needrestart.*\n", "")],
    "GPW-BASE-012": [("owned", "S 644 root root /etc/needrestart", "S 664 root root /etc/needrestart")],
    "GPW-BASE-013": [
        ("audit-base-units", "unit gpuwright-neighbour-guard.service", "failed gpuwright-neighbour-guard.service")
    ],
    "GPW-BASE-014": [("audit-base-units", r"\Z", "\noutdated docker.service")],
    "GPW-BASE-015": [("guard", r"\A", "fired.deadline at=2026-11-29T20:00:00Z id=1\trole=access\twho=x\tseconds=120")],
    "GPW-BASE-016": [("audit-base-guard-at-boot", "enabled", "disabled")],
    "GPW-BASE-017": [("audit-base-gpu-faults", r"\Z", "\nmissing 0123456789abcdef:12")],
    "GPW-BASE-018": [
        ("audit-base-timekeepers", "openntpd.service not-found inactive ", "openntpd.service loaded active enabled")
    ],
    "GPW-BASE-019": [("audit-base-cores", "services 0", "services infinity")],
    "GPW-BASE-020": [("audit-base-apparmor", "profile docker-default.*\n", "")],
    "GPW-BASE-021": [("audit-base-origins", r"\Z", "\nOrigins-Pattern origin=Debian,label=Debian")],
    "GPW-BASE-023": [("kernel-audit", "rule -w /etc/passwd .*\n", "")],
    "GPW-BASE-024": [("audit-base-auditd", "disk_full_action SUSPEND", "disk_full_action HALT")],
    "GPW-BASE-025": [("kernel-audit", "status lost 0", "status lost 3")],
    "GPW-BASE-026": [("audit-base-auditd", "mode 640 0 f /var/log", "mode 644 0 f /var/log")],
    "GPW-BASE-022": [("audit-base-origins", r"\Z", "\nUpdate-Days 1")],
    "GPW-BASE-027": [("audit-base-confinement", "NoNewPrivileges=yes", "NoNewPrivileges=no")],
    "GPW-CONT-001": [("units", "(?s)(Id=docker.service.*?)UnitFileState=enabled", r"\1UnitFileState=disabled")],
    "GPW-CONT-002": [("audit-docker-daemon", '"live_restore":true', '"live_restore":false')],
    "GPW-CONT-003": [("audit-docker-daemon", "/var/lib/docker", "/data/docker")],
    "GPW-CONT-004": [("audit-docker-bridge", "127.0.0.1", "0.0.0.0")],
    "GPW-CONT-005": [("audit-docker-access", "127.0.0.1:18001 users", "127.0.0.1:2375 users")],
    "GPW-CONT-006": [("audit-docker-access", "socket 660", "socket 666")],
    "GPW-CONT-007": [("audit-docker-access", r"\Z", "\nmember alice")],
    "GPW-CONT-008": [("audit-docker-access", "file 644 root root", "file 644 alice root")],
    "GPW-CONT-009": [("audit-docker-access", r"\Z", "\nproxy /usr/bin/docker-proxy -proto tcp")],
    "GPW-CONT-010": [("audit-docker-access", "\nheld docker.io", "")],
    "GPW-ACCS-001": [("audit-access-effective", r"(nobody\S+ 192.0.2.1 permitrootlogin) no", r"\1 yes")],
    "GPW-ACCS-002": [("audit-access-effective", r"(root 127.0.0.1 passwordauthentication) no", r"\1 yes")],
    "GPW-ACCS-003": [("audit-access-effective", "permitemptypasswords no", "permitemptypasswords yes")],
    "GPW-ACCS-004": [("audit-access-effective", r"(nobody\S+ \S+ ciphers )", r"\1aes128-cbc,")],
    "GPW-ACCS-005": [("audit-access-effective", "maxstartups 10:30:60", "maxstartups 10:30:100")],
    "GPW-ACCS-006": [("audit-access-effective", r"(root \S+ allowusers )auditor", r"\1bob")],
    "GPW-ACCS-007": [("audit-access-effective", "x11forwarding no", "x11forwarding yes")],
    "GPW-ACCS-008": [("audit-access-effective", "clientaliveinterval 60", "clientaliveinterval 0")],
    "GPW-ACCS-009": [("audit-access-effective", "permituserenvironment no", "permituserenvironment yes")],
    "GPW-ACCS-010": [("audit-access-host-keys", "file 600 root", "file 640 root")],
    "GPW-ACCS-011": [("audit-access-host-keys", r"\Z", "\nhostkey RSA 2048 /etc/ssh/ssh_host_rsa_key")],
    "GPW-ACCS-012": [("audit-access-effective", "banner /.*", "banner none")],
    "GPW-ACCS-013": [("audit-access-running", "changed 1795985999", "changed 1795986999")],
    "GPW-ACCS-014": [("audit-access-keys", "key auditor .* /", "key auditor SHA256:another /")],
    "GPW-ACCS-015": [("audit-access-keys", r"\Z", "\nexpired auditor")],
    "GPW-ACCS-016": [("audit-access-sudo", "pty deploy\n", "")],
    "GPW-ACCS-017": [("audit-access-sudo", r' ""\Z', "")],
    "GPW-ACCS-018": [("audit-access-script", "755 root", "775 root")],
    "GPW-ACCS-021": [("audit-access-effective", "loglevel VERBOSE", "loglevel INFO")],
    "GPW-ACCS-022": [("audit-access-accounts", "login\tauditor\tnone", "login\tauditor\tusable")],
    "GPW-ACCS-023": [("audit-access-accounts", "login\tauditor\tnone\t", "login\tauditor\tnone\tdocker")],
    "GPW-ACCS-024": [("audit-access-effective", r"(auditor \S+ disableforwarding) yes", r"\1 no")],
    "GPW-FIRE-001": [
        ("audit-firewall-table", '"input", "prio": 0, "policy": "drop"', '"input", "prio": 0, "policy": "accept"')
    ],
    "GPW-FIRE-002": [("audit-firewall-table", '"prio": -10, "policy": "drop"', '"prio": -10, "policy": "accept"')],
    "GPW-FIRE-003": [("audit-firewall-table", r'\{"accept": null\}', '{"drop": null}')],
    "GPW-FIRE-004": [("units", "(Id=gpuwright-firewall[^\n]*\n(?:[^\n]+\n)*?UnitFileState=)enabled", r"\1disabled")],
    "GPW-FIRE-005": [("audit-firewall-others", "nftables Stop .*", "nftables Stop /usr/sbin/nft flush ruleset")],
    "GPW-FIRE-006": [("audit-firewall-others", r"\Z", "\nfirewalld is active")],
    "GPW-FIRE-007": [
        ("audit-firewall-table", r'(?s)(.*"chain": "from_containers".*?)\{"drop": null\}', r'\1{"accept": null}')
    ],
    "GPW-FIRE-008": [("audit-firewall-table", r'\{"match": [^\n]*"saddr"[^\n]*?"len": 24\}{4}, (?=[^\n]*"dport")', "")],
    "GPW-CONT-011": [("audit-docker-drops", '"127.0.0.0"', '"10.0.0.0"')],
    "GPW-CONT-012": [("audit-containers", '"privileged":false', '"privileged":true')],
    "GPW-CONT-013": [("audit-containers", '"pid_mode":""', '"pid_mode":"host"')],
    "GPW-CONT-014": [
        ("audit-containers", r'"published":\[', '"published":[{"port":"9/tcp","address":"","host_port":"9"},')
    ],
    "GPW-CONT-015": [
        ("audit-containers", r'"mounts":\[', r'"mounts":[{"source":"/run/docker.sock","target":"/s","write":true},')
    ],
    "GPW-CONT-016": [("audit-containers", '"no-new-privileges"', '"no-new-privileges","seccomp:unconfined"')],
    "GPW-CONT-017": [("audit-containers", '"max-size":"64m"', '"max-size":""')],
    "GPW-CONT-018": [("audit-docker-policy", "NUMAPolicy=n/a\nId=docker", "NUMAPolicy=bind\nId=docker")],
    "GPW-CONT-019": [("containers-gpus", r"(?s)\A.*\Z", gpus(version="1.18.0-1"))],
    "GPW-CONT-020": [("containers-gpus", r"(?s)\A.*\Z", gpus(want="install"))],
    "GPW-CONT-021": [("audit-docker-gpus", '"/etc/cdi","/var/run/cdi"', "")],
    "GPW-CONT-022": [("containers-gpus", r"(?s)\A.*\Z", gpus(cdi="/etc/cdi/nvidia.yaml"))],
    "GPW-CONT-023": [("containers-gpus", r"(?s)\A.*\Z", gpus(driver="570.10.10"))],
    "GPW-CONT-024": [("containers-gpus", r"(?s)\A.*\Z", gpus(path="inactive"))],
    "GPW-CONT-025": [("audit-containers", r'"device_requests":\[', '"device_requests":[{"driver":"","ids":["all"]}')],
    "GPW-CONT-026": [("audit-gpus-inside", "UUID: GPU-00000000", "UUID: GPU-00000001")],
    "GPW-CONT-027": [("audit-docker-gpus", "runc", "nvidia")],
    "GPW-PCIE-001": [("pcie", "T 15 identity", "T 15 DMA-FQ")],
    "GPW-PCIE-002": [("pcie", "C 0000:00:02.0 word 0011", "C 0000:00:02.0 word 0015")],
    "GPW-PCIE-003": [("pcie", "I dmar0", "I dmar0\nH qemu-system-x86")],
    "GPW-PCIE-004": [("audit-pcie-unit", "ActiveState=active", "ActiveState=failed")],
    "GPW-PCIE-005": [("pcie", "A 0000:20:00.0/class:0x030200", "A 0000:20:00.0/class:0x0b4000")],
    "GPW-PCIE-006": [("pcie", "A 0000:20:00.0/current_link_width:16", "A 0000:20:00.0/current_link_width:4")],
    "GPW-PCIE-007": [("pcie", "0x0000009fffffffff", "0x000000800fffffff")],
    "GPW-PCIE-008": [("pcie", "drivers/nvidia", "drivers/nova_core")],
    "GPW-ENGN-033": [("audit-containers", '"environment":\\[', '"environment":["NCCL_P2P_DISABLE",')],
    "GPW-PCIE-009": [("p2p-verdicts", "good\t.*", "expired\tthe kernel was 6.17 and is 6.18")],
    "GPW-PCIE-010": [("audit-p2p-files", "644 root root", "664 root root")],
    "GPW-MEMO-001": [("memory", "driver=no\nmode=none", 'driver=yes\\nmode="driver"')],
    "GPW-MEMO-002": [("memory", "zone_reclaim=1", "zone_reclaim=2")],
    "GPW-MEMO-003": [("audit-memory-jobs", "NUMAMask=0", "NUMAMask=0-1")],
    "GPW-MEMO-004": [("audit-memory-above", "AllowedMemoryNodes=", "AllowedMemoryNodes=0")],
    "GPW-MEMO-005": [("audit-memory-engines", "Mems_allowed_list: 0-1", "Mems_allowed_list: 0")],
    "GPW-MODL-001": [("audit-models-store", '"revision":"c0', '"revision":"00')],
    "GPW-MODL-002": [("audit-models-store", "file tiny 1324520 model", "file tiny 1324519 model")],
    "GPW-MODL-003": [("audit-models-store", r"sum tiny [0-9a-f]{8}(.*tokenizer.json)", r"sum tiny 00000000\1")],
    "GPW-MODL-004": [("audit-models-store", "file tiny 508", "file tiny 9 modeling.py\nfile tiny 508")],
    "GPW-MODL-005": [
        ("audit-models-store", r'\["config.json"', f'["x.bin",0,"{"0" * 64}"],["config.json"'),
        ("audit-models-store", "file tiny 508", "file tiny 0 x.bin\nfile tiny 508"),
    ],
    "GPW-MODL-006": [("audit-models-store", "file tiny 508", "loose tiny 777 root /srv/models\nfile tiny 508")],
    "GPW-MODL-007": [("audit-models-tokens", r"\A", "process python3 4711 environ")],
    "GPW-MODL-008": [("audit-models-jobs", "NUMAMask=0", "NUMAMask=0-1")],
    "GPW-MODL-009": [("audit-models-jobs", "User=gpuwright-models", "User=")],
    "GPW-MODL-010": [("audit-models-jobs", "NoNewPrivileges=yes", "NoNewPrivileges=no")],
    "GPW-ENGN-001": [("audit-engine-units", "UnitFileState=enabled", "UnitFileState=disabled")],
    "GPW-ENGN-002": [("audit-images", "d1d1d1d1", "00000000")],
    "GPW-ENGN-003": [("audit-containers", '"gpuwright.config":"....', '"gpuwright.config":"0000')],
    "GPW-ENGN-004": [("audit-engine-inside", " / / ro,", " / / rw,")],
    "GPW-ENGN-005": [("audit-engine-inside", "CapBnd:\t0{16}", "CapBnd:\t0000000000002000")],
    "GPW-ENGN-006": [("audit-engine-inside", "NoNewPrivs:\t1", "NoNewPrivs:\t0")],
    "GPW-ENGN-007": [("audit-engine-inside", "Seccomp_filters:\t6", "Seccomp_filters:\t5")],
    "GPW-ENGN-008": [("audit-engine-inside", "Groups:\t10001", "Groups:\t10001 0")],
    "GPW-ENGN-009": [("audit-engine-inside", r"(core \S+ \S+) 0 0", r"\1 unlimited unlimited")],
    "GPW-ENGN-010": [("audit-engine-inside", r"(policy \S+ \S+) default", r"\1 bind:0")],
    "GPW-ENGN-011": [("audit-containers", '"restart":"no"', '"restart":"always"')],
    "GPW-ENGN-012": [("audit-containers", r'"networks":\["gpuwright-main"', '"networks":["bridge","gpuwright-main"')],
    "GPW-ENGN-013": [
        ("audit-containers", r'"published":\[', '"published":[{"port":"9/tcp","address":"127.0.0.1","host_port":"9"},')
    ],
    "GPW-ENGN-014": [("audit-containers", '"environment":.', '"environment":["AWS_SECRET_ACCESS_KEY",')],
    "GPW-ENGN-015": [("audit-engine-inside", "HF_HUB_OFFLINE=1", "HF_HUB_OFFLINE=0")],
    "GPW-ENGN-016": [
        ("audit-engine-inside", r"(env \S+) DO_NOT_TRACK=1", r"\1 DO_NOT_TRACK=1\n\1 VLLM_SERVER_DEV_MODE=1")
    ],
    "GPW-ENGN-017": [("audit-containers", '"arguments":.', '"arguments":["--trust-remote-code",')],
    "GPW-ENGN-018": [("audit-engine-units", "RestartUSec=5s", "RestartUSec=1min 5s")],
    "GPW-ENGN-019": [("audit-engine-units", "StartLimitIntervalUSec=.*", "StartLimitIntervalUSec=5min")],
    "GPW-ENGN-020": [("audit-engine-units", "TimeoutStartUSec=.*", "TimeoutStartUSec=1min 30s")],
    "GPW-ENGN-021": [("audit-engine-units", "Requires=", "Requires=docker.service ")],
    "GPW-ENGN-022": [("audit-engine-units", "=78 125", "=125")],
    "GPW-ENGN-023": [("audit-engine-served", "health main 200", "health main 503")],
    "GPW-ENGN-024": [("audit-engine-served", r"\Z", "\nevidence main 755 root root")],
    "GPW-ENGN-025": [("audit-engine-served", r"\Z", "\nkib main 65537")],
    "GPW-ENGN-026": [("audit-engine-inside", "/model ro,", "/model rw,")],
    "GPW-ENGN-027": [("audit-containers", '"source":"/srv/models/lab', '"source":"/srv/models/other')],
    "GPW-ENGN-028": [("audit-engine-inside", "/tmp rw,", "/tmp rw,noexec,")],
    "GPW-ENGN-029": [("audit-engine-inside", "size=262144k", "size=65536k")],
    "GPW-ENGN-030": [("audit-containers", '"pids_limit":8192', '"pids_limit":0')],
    "GPW-ENGN-031": [("audit-containers", '"devices":.', '"devices":["/dev/kvm"')],
    "GPW-ENGN-032": [("numa", r"\|1024\|0", "|1048577|0")],
    "GPW-GATE-001": [("units", "(?s)(Id=gpuwright-gateway.service.*?)ActiveState=active", r"\1ActiveState=failed")],
    "GPW-GATE-002": [("owned", "H ....(.*/caddy)", r"H 0000\1")],
    "GPW-GATE-003": [("audit-gateway-process", "Wanted:gpuwright-gateway", "Wanted:www-data")],
    "GPW-GATE-004": [("audit-gateway-process", "CapBnd:\t0000000000000400", "CapBnd:\t0000000000000401")],
    "GPW-GATE-005": [("audit-gateway-process", "NoNewPrivs:\t1", "NoNewPrivs:\t0")],
    "GPW-GATE-006": [("audit-gateway-process", "Seccomp_filters:.*", "Seccomp_filters:\t5")],
    "GPW-GATE-007": [("audit-gateway-process", r"\Z", "\nsees /home")],
    "GPW-GATE-008": [("gateway", "unit MemoryDenyWriteExecute=yes", "unit MemoryDenyWriteExecute=no")],
    "GPW-GATE-009": [("audit-gateway-process", "core 0 0", "core 0 unlimited")],
    "GPW-GATE-010": [("gateway", "unit TimeoutStopUSec=.*", "unit TimeoutStopUSec=1min 30s")],
    "GPW-GATE-011": [("gateway", "mode 640 (.*keys.caddy)", r"mode 644 \1")],
    "GPW-GATE-012": [("audit-gateway-keys", r"\Z", "\nrunning mallory-01 $2b$04$")],
    "GPW-GATE-013": [("audit-gateway-keys", r"running tester-0001 \$2b\$04", "running tester-0001 $2b$14")],
    "GPW-GATE-014": [("gateway", "mode 600 (.*admin.sock)", r"mode 666 \1")],
    "GPW-GATE-015": [("gateway", "listen 0.0.0.0:443", "listen 0.0.0.0:443\nlisten 0.0.0.0:80")],
    "GPW-GATE-016": [("gateway", "listen 127.0.0.1:2020", "listen 0.0.0.0:2020")],
    "GPW-GATE-017": [("gateway", "identity_running ....", "identity_running 0000")],
    "GPW-GATE-018": [("audit-gateway-sites", r"\|[^|]*GMT", "|Nov 29 12:00:00 2026 GMT")],
    "GPW-GATE-019": [("audit-gateway-sites", r"\|401\|", "|200|")],
    "GPW-GATE-020": [("audit-gateway-log", '"json":.', '"json":0')],
    "GPW-GATE-021": [("audit-gateway-log", '"key_like":0', '"key_like":1')],
    "GPW-GATE-022": [("audit-gateway-log", '"mode":"600', '"mode":"644')],
    "GPW-GATE-023": [("audit-gateway-files", "600 gpuwright-gateway", "604 gpuwright-gateway")],
    "GPW-GATE-024": [("gateway-engine-guard", r'"prio": 10, "policy": "accept"', '"prio": 11, "policy": "accept"')],
}

# Rules changed in the kernel are always others than the node file's.
ALSO = {"GPW-ENGN-019": {"GPW-ENGN-018"}} | {f"GPW-FIRE-00{number}": {"GPW-FIRE-003"} for number in (1, 2, 7, 8)}
# An engine that uses P2P must not, once its verdict is over.
ALSO |= {"GPW-PCIE-009": {"GPW-ENGN-033"}}
# The one container of the recorded host is an engine's, and this engine has no GPUs.
ALSO |= {"GPW-CONT-025": {"GPW-ENGN-031"}}


def changed(answers, changes):
    found = dict(answers)
    for section, pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, found[section], count=1)
        assert count == 1, f"{pattern!r} is not in the recorded answer of {section}"
        assert text != found[section]
        found[section] = text
    return found


def test_every_control_is_doctored():
    # Those of role kernel are doctored in tests/unit/kernel/test_kernel_checks.py: a lab host has its machine's kernel; those of
    # role nvidia in tests/unit/nvidia/test_nvidia_checks.py: the recorded host has no card.
    elsewhere = ("kernel", "nvidia")
    ids = {control.id for role in controls.ROLES if role not in elsewhere for control in controls.of_role(role)}
    assert DOCTORED.keys() == ids


@pytest.mark.parametrize("control", DOCTORED)
def test_one_thing_wrong_is_one_control_red(control, answers, spec):
    right = changed(answers, MACHINE.get(control, []))
    spec = with_two_gpus(spec) if control in OF_SEVERAL_GPUS else with_cards(spec) if control in WITH_GPUS else spec
    before = outcomes(right, spec)
    assert before[control].outcome is Outcome.PASS, before[control].verdict.actual
    after = outcomes(changed(right, DOCTORED[control]), spec)
    turned = {key for key in after if after[key].outcome is not before[key].outcome}
    assert turned == {control, *ALSO.get(control, ())}, {key: after[key].verdict.actual for key in turned}
    assert after[control].outcome is Outcome.FAIL
    assert after[control].verdict.actual != before[control].verdict.actual


@pytest.mark.parametrize(("value", "right"), [("yes", True), ("1K", True), ("no", False), ("off", False)])
def test_a_journal_that_is_not_compressed_is_red(value, right, answers, spec):
    said = outcomes(changed(answers, [("audit-base-journal", r"\Z", f"\ncompress {value}")]), spec)["GPW-BASE-001"]
    assert (said.outcome is Outcome.PASS) is right
    assert f"Compress={value}" in said.verdict.actual


@pytest.mark.parametrize("section", sorted(RECORDED))
def test_a_section_that_failed_is_an_error_of_every_control_that_reads_it(section, answers, spec):
    seen = Snapshot({name: (1 if name == section else 0, text) for name, text in answers.items()})
    results = judge_all(controls.of_node(spec), seen, spec)
    touched = {r.control.id: r.outcome for r in results if section in {s.name for s in r.control.observed}}
    assert touched, "a section nobody reads"
    not_errors = {key for key, outcome in touched.items() if outcome is not Outcome.ERROR}
    assert not_errors == _DECIDED_BEFORE.get(section, set())


# Controls that another fact decided before this section was needed.
_DECIDED_BEFORE = {
    "audit-base-clock": {"GPW-BASE-003"},  # a container
    # no controllers; no engine of several GPUs; no GPUs
    "audit-containers": {"GPW-ENGN-030", "GPW-ENGN-033", "GPW-CONT-025"},
    "containers-gpus": WITH_GPUS - {"GPW-CONT-021", "GPW-CONT-025", "GPW-CONT-026", "GPW-CONT-027"},
    "audit-docker-gpus": {"GPW-CONT-021", "GPW-CONT-027"},
    "audit-gpus-inside": {"GPW-CONT-026"},
    "audit-base-apparmor": {"GPW-BASE-020"},  # a container
    "audit-base-auditd": {"GPW-BASE-024", "GPW-BASE-026"},  # a container
    "kernel-audit": {"GPW-BASE-023", "GPW-BASE-024", "GPW-BASE-025"},  # a container
    "p2p-verdicts": {"GPW-ENGN-033", "GPW-PCIE-009"},  # no engine of several GPUs
    "audit-p2p-files": {"GPW-PCIE-010"},  # no engine of several GPUs
    # the node file names nodes; a container
    "numa": {"GPW-MODL-008", "GPW-MEMO-001", "GPW-MEMO-005"},
    "memory": {"GPW-MEMO-001", "GPW-MEMO-002"},  # a container
    "pcie": {f"GPW-PCIE-{number:03}" for number in (1, 2, 3, 5, 6, 7, 8)},  # a container
    "audit-pcie-unit": {"GPW-PCIE-004"},  # a container
    "audit-memory-above": {"GPW-MEMO-004"},  # a container
    "audit-memory-engines": {"GPW-MEMO-005"},  # a container
}


# --- P2P between the GPUs of one engine -------------------------------------------------------------------------------


def p2p(answers, spec, word, *changes, key="GPW-ENGN-033"):
    line = ("p2p-verdicts", r"\Z", f"main\t{word}\tbecause")
    return outcomes(changed(answers, [line, *changes]), with_two_gpus(spec))[key].verdict


def without_p2p(spec, label=None):
    """A container with everything that turns P2P off."""
    apart = container.separation(spec.engine.engines["main"])
    names = ",".join(f'"{name}"' for name in [*apart.all_environment, ""])[:-3]
    label = apart.label if label is None else label
    return [
        ("audit-containers", '"environment":\\[', f'"environment":[{names},'),
        ("audit-containers", '"arguments":\\[', '"arguments":["--disable-custom-all-reduce",'),
        ("audit-containers", '"labels":{', f'"labels":{{"gpuwright.p2p":"{label}",'),
    ]


@pytest.mark.parametrize("word", ["bad", "none", "expired", "missing"])
def test_without_a_good_verdict_every_flag_is_wanted(answers, spec, word):
    found = p2p(answers, spec, word, *without_p2p(spec))
    assert found.outcome is Outcome.PASS, found.actual
    for left_out in range(3):
        flags = without_p2p(spec)
        del flags[left_out]
        found = p2p(answers, spec, word, *flags)
        assert found.outcome is Outcome.FAIL
    assert p2p(answers, spec, word, *without_p2p(spec, "off-older")).outcome is Outcome.FAIL
    assert p2p(answers, spec, "good", *without_p2p(spec)).outcome is Outcome.FAIL


def test_could_not_look_at_a_verdict_is_an_error(answers, spec):
    for key in ("GPW-ENGN-033", "GPW-PCIE-009"):
        assert p2p(answers, spec, "unknown", key=key).outcome is Outcome.ERROR


def test_unjudged_gpus_are_for_a_person_to_judge(answers, spec):
    bare = with_two_gpus(spec).model_copy(update={"pcie": None})
    found = outcomes(answers, bare)["GPW-ENGN-033"].verdict
    assert found.outcome is Outcome.MANUAL
    assert "P2P between the GPUs of main is not judged (the node file has no role pcie)" in found.actual
    off = spec.pcie.model_copy(update={"p2p": P2pSpec(mode="off", off_reason="both cards are on one die")})
    found = outcomes(answers, with_two_gpus(spec).model_copy(update={"pcie": off}))
    assert found["GPW-ENGN-033"].outcome is Outcome.MANUAL
    assert "both cards are on one die" in found["GPW-ENGN-033"].verdict.actual
    assert found["GPW-PCIE-009"].outcome is Outcome.NOT_APPLICABLE
