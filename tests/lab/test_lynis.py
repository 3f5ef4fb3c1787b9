"""Independent judges on booted hosts, before and after every profile: figures, and a written reason for every word that is left.

A lab host is a container: what is about kernel, boot loader and disks is judged of the machine around it, or not at all.
"""

from __future__ import annotations

from functools import partial

import judges
import pytest
import trial

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def judged(request, tmp_path_factory):
    """One host taken through the profiles, and what the judges said at each stage."""
    release = request.param
    name = {"trixie": "judged-13", "bookworm": "judged-12"}[release]
    node = trial.blank(name, release, tmp_path_factory.mktemp("judged"), {})
    public = f"{node.host.ssh_key}.pub"
    said, guides = {}, {}
    try:
        node.host.run(judges.INSTALL + "lynis >/dev/null 2>&1", timeout=300)
        if release == "bookworm":
            node.host.run(judges.INSTALL_GUIDES, timeout=300)
        node.node = {
            "os": judges.RELEASES[release].lower().replace(" ", "-"),
            "base": {"unattended_upgrades": True},
            "access": {"users": {"deploy": {"keys": [public], "sudo": "all"}}, "banner": "For authorised use only."},
            "firewall": {"ssh": [str(node.host.segment.network)]},
            "kernel": {},
            "containers": {},
        }
        for stage in judges.STAGES:
            if stage != "blank":
                node.node["hardening"] = stage
                node.node["console"] = True
                if stage == "baseline":
                    node.deploy()
                    node.connect = {"ssh_user": "deploy", "_sudo": True}
                node.deploy()
            said[stage] = judges.lynis(partial(judges.console, node))
            # Half an hour's work, kept where a run that is cut short leaves it.
            (node.directory / f"lynis-{stage}.dat").write_text(said[stage].text)
            if release == "bookworm":
                guides[stage] = judges.openscap(node)
        yield release, said, guides
    finally:
        node.host.destroy()


def test_lynis_finds_the_node_as_hard_as_the_page_says_and_harder_with_every_profile(judged):
    release, said, _ = judged
    found = {stage: one.index for stage, one in said.items()}
    assert found["blank"] < found["baseline"] <= found["server-cis1"] <= found["strict"]
    recorded = judges.figures("lynis figures").get(judges.RELEASES[release], {})
    softer = {stage: index for stage, index in found.items() if stage != "blank" and index < recorded.get(stage, 101)}
    assert softer == {}, (
        f"put this into docs/hardening.md, if it is meant: | {judges.RELEASES[release]} | "
        + " | ".join(said[stage].figure for stage in judges.STAGES)
    )


@pytest.mark.parametrize("stage", judges.STAGES[1:])
def test_whatever_lynis_still_says_has_a_written_reason(judged, stage):
    _, said, _ = judged
    reasons = {(row[0].strip("`"), row[1]): row[2] for row in judges.rows("lynis findings")}
    assert all(len(reason) > 15 for reason in reasons.values())
    missing = sorted(said[stage].findings - reasons.keys())
    assert missing == [], "\n".join(f"| `{key}` | {sentence} | … |" for key, sentence in missing)


def test_openscap_finds_the_node_as_hard_as_the_page_says(judged):
    release, _, guides = judged
    if release != "bookworm":
        pytest.skip("Debian's package of the guides has none for Debian 13")
    recorded = judges.figures("openscap figures")
    found = {
        judges.GUIDES[name]: {stage: guides[stage][name].score for stage in judges.STAGES} for name in judges.GUIDES
    }
    softer = {
        name: {stage: score for stage, score in scores.items() if stage != "blank" and score < recorded.get(name, {}).get(stage, 101) - 0.1}
        for name, scores in found.items()
    }  # fmt: skip
    assert not any(softer.values()), "put this into docs/hardening.md, if it is meant:\n" + "\n".join(
        f"| {judges.GUIDES[name]} | "
        + " | ".join(f"{guides[s][name].score:.1f} ({guides[s][name].passed} pass, {len(guides[s][name].failed)} fail)" for s in judges.STAGES)
        + " |"
        for name in judges.GUIDES
    )  # fmt: skip
    reasons = {row[0].strip("`"): row[1] for row in judges.rows("openscap findings")}
    left = {rule for one in guides["strict"].values() for rule in one.failed}
    assert left <= reasons.keys(), "\n".join(f"| `{rule}` | … |" for rule in sorted(left - reasons.keys()))
