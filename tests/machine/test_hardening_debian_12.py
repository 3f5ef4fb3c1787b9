"""The profiles' kernel half on Debian 12: hardened.py has the tests."""

import pytest
from hardened import *  # noqa: F403 - the tests, and what they need


@pytest.fixture(scope="module")
def release():
    return "bookworm"
