"""The hub stand-in: a model hub's HTTP API over a directory, with faults on demand. For the lab and tests only."""
