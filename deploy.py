"""The table of contents: which roles, in which order. Nothing else."""

from pyinfra.context import ctx_host, ctx_state

from gpuwright import connect, ownership, wishes
from gpuwright.audit import privileged
from gpuwright.deploy import announce
from gpuwright.ingress import ingress
from gpuwright.peers import peer_groups
from gpuwright.spec.fleet import node
from gpuwright.upstreams import upstreams
from roles.access import access, access_retired
from roles.base import base
from roles.base.auditing import audited
from roles.containers import containers, containers_verified
from roles.engine import engine
from roles.firewall import firewall
from roles.gateway import gateway
from roles.kernel import kernel, kernel_verified
from roles.memory import memory_verified
from roles.models import models_start, models_verified
from roles.nvidia import nvidia, nvidia_verified
from roles.pcie import pcie, pcie_verified

host = ctx_host.get()
connect.keep_tuned(ctx_state.get(), host)
spec = node(host)
barrier = wishes.barrier(spec)
announce(host, barrier)

ownership.retire_roles(present=spec.roles, but=("access", "firewall"))
base(spec.base, profile=spec.hardening)
if spec.access:
    access(spec.access, profile=spec.hardening, audit_script=privileged.script(spec), guarded=spec.base.guard)
else:
    access_retired(guarded=spec.base.guard)
if spec.firewall:
    firewall(spec.firewall, ports=ingress(spec), guarded=spec.base.guard)
if spec.models:  # weights are on their way while the rest is installed
    models_start(spec.models, hardware=spec.hardware)
# Configure; then one reboot, where one is needed and allowed; then read back what the machine has become.
peers = peer_groups(spec)
if spec.pcie:
    pcie(spec.pcie, hardware=spec.hardware, peers=peers)
if spec.nvidia:
    nvidia(spec.nvidia, hardware=spec.hardware)
if spec.kernel:
    kernel(spec.kernel, wishes=barrier.wanted)
    kernel_verified(spec.kernel, wishes=barrier.wanted)
if spec.pcie:
    pcie_verified(spec.pcie, hardware=spec.hardware)
others = wishes.other_gpu_drivers(barrier.wanted)
if spec.memory:
    memory_verified(spec.memory, hardware=spec.hardware, others=others)
if spec.nvidia:
    nvidia_verified(spec.nvidia, hardware=spec.hardware, others=others, reboots=barrier.reboots)
if spec.containers:
    containers(spec.containers, gpus=spec.hardware.gpus.count, firewall=spec.firewall is not None)
# A firewall goes only now that `containers` keeps neighbours away itself.
if not spec.firewall:
    ownership.retire("firewall", keep=())
if spec.models:
    models_verified(spec.models, hardware=spec.hardware)
if spec.engine:
    judged = [group.engine for group in peers]
    engine(spec.engine, models=spec.models, hardware=spec.hardware, barrier=barrier, judged=judged)
if spec.gateway:
    gateway(spec.gateway, engines=upstreams(spec.engine), profile=spec.hardening)
if spec.containers:
    containers_verified(gpus=spec.hardware.gpus.count)
audited(spec.base, profile=spec.hardening)  # last: what it watches is there by now
