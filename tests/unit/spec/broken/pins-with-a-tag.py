from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet({"gpu-01": {"node": "good.yaml"}}, __file__, pins={"images": {"a/b:c": "latest"}})
