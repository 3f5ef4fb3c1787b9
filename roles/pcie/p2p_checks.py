"""What role `pcie` promises of P2P between the GPUs of an engine."""

from __future__ import annotations

from gpuwright.audit.control import Control, Verdict, not_applicable, without
from gpuwright.peers import VERDICTS, peer_groups
from gpuwright.snapshot import CouldNotLook, Section, Snapshot
from gpuwright.spec.node import NodeSpec


def _parse_writers(text: str) -> list[tuple[str, str]]:
    found = []
    for line in text.splitlines():
        mode, user, group, path = line.split(" ", 3)
        found.append((path, f"{mode} {user}:{group}"))
    return found


# Whoever can write a verdict, or what reads it, decides whether GPUs use P2P.
FILES = Section(
    "audit-p2p-files",
    r"""
for path in /var/lib/gpuwright/pcie/p2p /var/lib/gpuwright/pcie/p2p/* /etc/gpuwright/pcie/p2p /usr/local/lib/gpuwright/p2p-*; do
  [ ! -e "$path" ] || stat -c '%a %U %G %n' "$path"
done
exit 0
""",
    _parse_writers,
)


def _fresh(seen: Snapshot, spec: NodeSpec) -> Verdict:
    groups = peer_groups(spec)
    if spec.pcie and spec.pcie.p2p.mode == "off":
        return not_applicable(f"pcie.p2p.mode is off: {spec.pcie.p2p.off_reason}")
    if not groups:
        return not_applicable("no engine has more than one GPU")
    verdicts = seen.read(VERDICTS)
    faults, fine = [], []
    for group in groups:
        verdict = verdicts.get(group.engine)
        if verdict is None:
            faults.append(f"{group.engine}: nothing on the node judges it")
        elif verdict.word == "unknown":
            raise CouldNotLook(f"{group.engine}: {verdict.sentence}")
        elif verdict.word in ("good", "bad"):
            fine.append(f"{group.engine}: {verdict.word}, {verdict.sentence}")
        else:
            faults.append(f"{group.engine}: {verdict.word}, {verdict.sentence}")
    return without(
        faults, "a verdict, good or bad, of the driver, kernel, image and topology as they are", "; ".join(fine)
    )


def _for_root_alone(seen: Snapshot, spec: NodeSpec) -> Verdict:
    if not peer_groups(spec):
        return not_applicable("P2P is not judged on this node")
    found = seen.read(FILES)
    faults = [
        f"{path} is {mode}"
        for path, mode in found
        if not mode.endswith(" root:root") or set(mode.split()[0][-2:]) & set("2367")
    ]
    return without(faults, "written by root alone", f"{len(found)} files and folders")


CONTROLS = (
    Control(
        id="GPW-PCIE-009",
        title="P2P between the GPUs of every engine is judged, and nothing the verdict depends on has changed.",
        reason="A driver that calls peer access OK has meant hangs and silently wrong bytes (gpu-node.md 0.4); without a "
        "verdict that holds, engines run without P2P, which is slower.",
        severity="high",
        observed=(VERDICTS,),
        predicate=_fresh,
        remedy="pyinfra INVENTORY deploy.py, or systemctl restart gpuwright-engine-NAME: its GPUs are judged while it is down; "
        "what the probe said: journalctl -u gpuwright-p2p",
        risk="the engine is drained and restarted; the probe takes about a minute",
    ),
    Control(
        id="GPW-PCIE-010",
        title="Only root can write verdicts on P2P.",
        reason="Whoever writes one decides whether an engine's GPUs trust each other's memory.",
        severity="high",
        observed=(FILES,),
        predicate=_for_root_alone,
        remedy="chown -R root: /var/lib/gpuwright/pcie/p2p; chmod -R go-w /var/lib/gpuwright/pcie/p2p; then deploy",
        risk="none",
    ),
)
