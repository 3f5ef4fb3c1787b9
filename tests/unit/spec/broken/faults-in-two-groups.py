from gpuwright.spec.fleet import fleet as _fleet

first = _fleet({"gpu-01": {"node": "unknown-os.yaml"}}, __file__)
second = _fleet({"gpu-02": {"node": "port-octal.yaml"}}, __file__)
