"""Role kernel on a host that is a container: its machine's kernel is not ours, and the run says so."""

from __future__ import annotations

import pytest
import trial

pytestmark = pytest.mark.lab


def test_a_container_is_left_alone_in_one_sentence(tmp_path):
    node = trial.blank("kernel", "trixie", tmp_path, {"kernel": {"reboot": "when-needed"}})
    try:
        dry = node.run("--dry")
        assert dry.status == 0, dry.said
        said = node.deploy().said
        assert "kernel: not applicable, the host is a container and has its machine's kernel" in said
        assert "reboot needed" not in said
        assert (
            node.sh("ls /etc/default/grub.d /etc/sysctl.d /etc/modprobe.d 2>/dev/null | grep gpuwright || true") == ""
        )
        assert node.deploy().changed == []
    finally:
        node.host.destroy()
