"""Our lint covers what systemd-analyze verify lets pass."""

import pytest

from gpuwright.units import lint


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[Service]\nStartLimitBurst=3\n", "line 2: StartLimitBurst= belongs in [Unit]"),
        ("[Unit]\nRestart=on-failure\n", "line 2: Restart= belongs in [Service]"),
        ("[Unit]\nWantedBy=multi-user.target\n", "line 2: WantedBy= belongs in [Install]"),
        ("[Unit]\nStartLimitInterval=3\n", "StartLimitIntervalSec= since systemd 230"),
    ],
)
def test_a_key_that_systemd_would_ignore_is_refused(text, fault):
    assert any(fault in found for found in lint("x.service", text))


def test_comments_and_right_places_pass():
    assert (
        lint(
            "x.service",
            "# Restart=x\n[Unit]\nStartLimitBurst=3\n[Service]\nRestart=on-failure\n[Install]\nWantedBy=a\n",
        )
        == []
    )
