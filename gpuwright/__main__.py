"""``python -m gpuwright`` is the same as ``gpuwright``."""

from gpuwright.cli import main

if __name__ == "__main__":
    main()
