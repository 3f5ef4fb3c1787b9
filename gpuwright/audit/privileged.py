"""What an audit needs root for, as one script without arguments that lies on the node.

An account that may run this and nothing else can audit a node and change nothing. The audit compares the script's hash
with the one it would have sent, so that it never reads what another script says.
"""

from __future__ import annotations

import hashlib

from gpuwright import snapshot
from gpuwright.audit import controls
from gpuwright.spec.node import NodeSpec

_HEAD = """\
#!/bin/sh
# Owned by gpuwright, role access. Changes here are overwritten; edit the node file.
#
# Reads this node's state for an audit, as root and without arguments; changes nothing. Made from the controls of the node.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
cd /
"""


def script(spec: NodeSpec) -> bytes:
    """The script for a node: the questions of all its controls."""
    return f"{_HEAD}{snapshot.script(controls.sections(controls.of_node(spec)))}\n".encode()


def digest(spec: NodeSpec) -> str:
    """Its sha256, in hexadecimal."""
    return hashlib.sha256(script(spec)).hexdigest()
