"""How the controls of a hardened machine are turned red, and how the machine is put right again; as kernel_sabotage.py.

The node has profile server-cis1 or strict. Rules that are locked (strict) cannot be sabotaged: that is their purpose.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from sabotage import Sabotage

_AGAIN = "augenrules --load >/dev/null 2>&1"

# In server-cis1, where the rules are not locked.
UNLOCKED: dict[str, Sabotage] = {
    "GPW-BASE-020": Sabotage(
        "printf docker-default >/sys/kernel/security/apparmor/.remove", "systemctl restart docker.service"
    ),
    "GPW-BASE-023": Sabotage("auditctl -W /etc/sudoers -p wa -k gpuwright-sudo", _AGAIN, heals=True),
    "GPW-BASE-024": Sabotage(
        "cp -a /etc/audit/auditd.conf /run/kept.conf; sed -i 's/^disk_full_action.*/disk_full_action = HALT/' /etc/audit/auditd.conf",
        "cp -a /run/kept.conf /etc/audit/auditd.conf",
    ),
    # A queue of one, and two programs that write into it at once.
    "GPW-BASE-025": Sabotage(
        "auditctl -b 1 >/dev/null; for n in 1 2 3 4; do (for m in $(seq 200); do touch /etc/sudoers.d; done) & done; wait; "
        "auditctl -b 8192 >/dev/null; [ $(auditctl -s | sed -n 's/^lost //p') -gt 0 ]",
        "auditctl --reset-lost >/dev/null",
    ),
    "GPW-BASE-026": Sabotage("chmod 0644 /var/log/audit/audit.log", "chmod 0640 /var/log/audit/audit.log"),
    "GPW-KERN-015": Sabotage("sysctl -qw kernel.core_pattern=core", "sysctl -q --system", heals=True),
}

# Only strict asks for these.
LOCKED: dict[str, Sabotage] = {
    "GPW-KERN-016": Sabotage("sysctl -qw dev.tty.ldisc_autoload=1", "sysctl -q --system", heals=True),
}
