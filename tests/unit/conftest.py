"""Names of tests are the same in every process and can be read: contents of files make neither. A lock that another process holds."""

import contextlib
import subprocess

import pytest


def pytest_make_parametrize_id(config, val, argname):
    """A file's content (bytes, several lines, a fresh hash) is named after its argument; pytest numbers them."""
    if isinstance(val, bytes) or (isinstance(val, str) and ("\n" in val or "$2b$" in val)):
        return argname
    return None


@pytest.fixture
def held():
    """``with held(path):`` another process has the lock file `path` until the block ends."""

    @contextlib.contextmanager
    def held(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["flock", path, "sh", "-c", "echo held; read -r end"]  # read ends with its input
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout.readline() == "held\n"
            yield

    return held
