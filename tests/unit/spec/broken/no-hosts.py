from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({}, __file__)
