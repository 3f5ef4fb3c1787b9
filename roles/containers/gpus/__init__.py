"""The GPU half of role `containers`: NVIDIA's container toolkit, the CDI specification, and containers that keep their GPUs."""
