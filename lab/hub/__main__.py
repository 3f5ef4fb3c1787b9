"""``python -m lab.hub --root DIR``: the hub stand-in as a process."""

from lab.hub.server import main

if __name__ == "__main__":
    main()
