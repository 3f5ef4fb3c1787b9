from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({"gpu_01:22": {"node": "good.yaml"}}, __file__)
