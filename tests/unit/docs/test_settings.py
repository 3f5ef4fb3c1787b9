"""docs/settings.md says what the models say."""

import re
from pathlib import Path

from gpuwright.spec import reference

PAGE = Path(__file__).resolve().parents[3] / "docs" / "settings.md"


def rows() -> dict[str, list[str]]:
    found = {}
    for line in reference.page().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0].startswith("`"):
            found[cells[0].strip("`")] = cells[1:]
    return found


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text() == reference.page(), (
        "a setting changed; run: python -m gpuwright.spec.reference > docs/settings.md"
    )


def test_every_setting_has_its_reason() -> None:
    assert [path for path, (*_, why) in rows().items() if not why and path != "gateway.tls"] == []


def test_values_read_as_a_person_writes_them() -> None:
    found = rows()
    assert found["base.journal_max_use"][:2] == ["size", "`2 GiB`"]
    assert found["engine.engines.<name>.restart.interval"][:2] == ["duration", "`2 h`"]
    assert found["engine.engines.<name>.port"][:3] == ["whole number", "required", "1 to 65535"]
    assert found["engine.engines.<name>.settings.gpu_memory_utilization"][2] == "more than 0, at most 0.98"
    assert found["containers.source"][1:3] == ["`distribution`", "`distribution`, `docker`"]
    assert found["models.items.<name>.repo"][2] == "a model is named organisation/name"
    assert found["gateway.listen.<n>.port"][1] == "`443`"
    assert found["models.token"][:2] == ["secret reference", "none"]
    assert found["gpuwright"][1:3] == ["required", "`1`"]
