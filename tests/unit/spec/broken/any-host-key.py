from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({"gpu-01": {"node": "good.yaml", "ssh_strict_host_key_checking": "no"}}, __file__)
