"""Names of tests are the same in every process and can be read: contents of files make neither."""


def pytest_make_parametrize_id(config, val, argname):
    """A file's content (bytes, several lines, a fresh hash) is named after its argument; pytest numbers them."""
    if isinstance(val, bytes) or (isinstance(val, str) and ("\n" in val or "$2b$" in val)):
        return argname
    return None
