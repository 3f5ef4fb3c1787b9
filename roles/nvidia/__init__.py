"""The GPU driver of a node: what is there, and whether its parts fit together. Reads only, so far."""
