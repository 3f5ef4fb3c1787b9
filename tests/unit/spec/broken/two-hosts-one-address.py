from gpuwright.spec.fleet import fleet as _fleet

gpu_nodes = _fleet(
    {
        "gpu-01": {"node": "good.yaml", "ssh_hostname": "10.0.0.1"},
        "gpu-02": {"node": "good.yaml", "ssh_hostname": "10.0.0.1"},
    },
    __file__,
)
