from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({"gpu-01": {"node": "../access.yaml"}}, __file__)
