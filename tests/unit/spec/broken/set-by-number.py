from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({"gpu-01": {"node": "good.yaml", "set": {1: "x"}}}, __file__)
