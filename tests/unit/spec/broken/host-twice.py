from gpuwright.spec.fleet import fleet as _fleet

first = _fleet({"gpu-01": {"node": "good.yaml"}}, __file__)
second = _fleet({"gpu-01": {"node": "good.yaml"}}, __file__)
