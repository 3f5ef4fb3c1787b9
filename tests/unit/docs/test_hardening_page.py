"""docs/hardening.md says what the roles' tables say, and every setting of a profile has what a reader needs."""

from pathlib import Path

import pytest

from gpuwright.audit import profiles
from roles.base import auditing
from roles.base import hardening as base
from roles.kernel import hardening as kernel

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hardening.md"
SETTINGS = [*base.SETTINGS, *auditing.SETTINGS, *kernel.SYSCTLS, *kernel.MODULES, *profiles.of_access()]


def test_the_page_is_not_stale() -> None:
    text = PAGE.read_text()
    assert text == profiles.renewed(text), "a table changed; run: python -m gpuwright.audit.profiles docs/hardening.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_says_why_what_it_breaks_and_how_to_waive_it(setting) -> None:
    assert setting.reason and setting.may_break and setting.waiver
    assert any(setting.values)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="profiles: begin"):
        profiles.renewed("a page")
