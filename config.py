"""pyinfra's settings, with the version it insists on before any host is touched."""

REQUIRE_PYINFRA_VERSION = "==3.10.0"
