"""``pytest tests/audit --inventory inventory/prod.py``: does every node keep its promises?

One test per control and host, judged on one snapshot per host; and tests that ask from outside (a refused connection, a
401). Nothing here changes a node.
"""

import datetime
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import testinfra
from testinfra.backend.base import BaseBackend

from gpuwright.audit import connection, controls
from gpuwright.audit.control import Outcome
from gpuwright.audit.judge import judge, unseen
from gpuwright.audit.report import HostReport, write
from gpuwright.snapshot import CouldNotLook
from gpuwright.spec.fault import report as fault_report
from gpuwright.spec.fleet import collect
from gpuwright.spec.node import NodeSpec


@dataclass
class Node:
    """One host of the inventory: what it must be, and the connection to it."""

    name: str
    spec: NodeSpec
    data: dict
    host: testinfra.host.Host

    @property
    def address(self):
        """Where the controller reaches it."""
        return self.data.get("ssh_hostname", self.name)


@dataclass
class Audit:
    """This run: hosts, what they answered, what came of it."""

    nodes: list[Node]
    auditor: str | None = None
    reports: dict[str, HostReport] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)

    def read(self, node):
        """As the deploy's user with all its rights, or through the one script that an audit account may run."""
        if self.auditor:
            return connection.read_as_auditor(node.host, node.spec)
        return connection.read(node.host, controls.of_node(node.spec))

    def look(self):
        """One exchange with each host, side by side."""

        def read(node):
            started = datetime.datetime.now(datetime.UTC)
            try:
                return HostReport(node.name, started, self.read(node))
            except CouldNotLook as reason:
                self.unreached[node.name] = str(reason)
                return HostReport(node.name, started, None)

        with ThreadPoolExecutor(max_workers=16) as pool:
            self.reports = {found.host: found for found in pool.map(read, self.nodes)}


AUDIT = pytest.StashKey[Audit]()


def pytest_addoption(parser):
    group = parser.getgroup("gpuwright audit")
    group.addoption("--inventory", metavar="FILE", help="the inventory whose hosts are audited (inventory/prod.py)")
    group.addoption("--limit", metavar="HOST[,HOST]", help="only these hosts of the inventory")
    group.addoption(
        "--audit-user", metavar="NAME", help="connect as this account, whose sudo is 'audit' in the node file"
    )
    group.addoption("--audit-key", metavar="FILE", help="with this key instead of the inventory's")
    group.addoption("--audit-json", metavar="FILE", help="write every result with its evidence")


def pytest_configure(config):
    config.addinivalue_line("markers", "outside: asks from the controller, as a client or an attacker would")
    config.stash[AUDIT] = Audit(_nodes(config), config.getoption("--audit-user", None))


def _nodes(config):
    inventory = config.getoption("--inventory", None)
    if not inventory:
        return []
    if not Path(inventory).is_file():
        raise pytest.UsageError(f"there is no inventory {inventory}; the ones here are inventory/*.py")
    collected = collect(Path(inventory))
    if collected.faults:
        raise pytest.UsageError(fault_report(collected.faults))
    wanted = [name for name in (config.getoption("--limit") or "").split(",") if name]
    unknown = [name for name in wanted if name not in collected.specs]
    if unknown:
        known = ", ".join(collected.specs)
        raise pytest.UsageError(f"--limit names {', '.join(unknown)}; the hosts of {inventory} are: {known}")
    return [
        Node(name, spec, collected.hosts[name], _host(config, name, collected.hosts[name]))
        for name, spec in collected.specs.items()
        if not wanted or name in wanted
    ]


def _host(config, name, data):
    """The connection of the inventory, or the one that testinfra's --hosts names for the same host."""
    for spec in (config.getoption("--hosts", None) or "").split(","):
        if spec and BaseBackend.parse_hostspec(spec.partition("://")[2].partition("?")[0]).name == name:
            options = ("ssh_config", "ssh_identity_file", "sudo", "sudo_user")
            return testinfra.get_host(spec, **{option: config.getoption(option) for option in options})
    if auditor := config.getoption("--audit-user"):
        key = config.getoption("--audit-key")
        data = {**data, "ssh_user": auditor, "_sudo": False, **({"ssh_key": key} if key else {})}
    return connection.connect(name, data)


def pytest_generate_tests(metafunc):
    nodes = metafunc.config.stash[AUDIT].nodes
    if "control" in metafunc.fixturenames:
        cases = [(node, control) for node in nodes for control in controls.of_node(node.spec)]
        ids = [f"{node.name}::{control.id} {control.title.rstrip('.')}" for node, control in cases]
        metafunc.parametrize(("node", "control"), cases, ids=ids)
    elif "node" in metafunc.fixturenames:
        metafunc.parametrize("node", nodes, ids=[node.name for node in nodes])


def pytest_collection_modifyitems(config, items):
    if auditor := config.stash[AUDIT].auditor:
        for item in items:
            if item.path.name == "test_other_users.py":
                item.add_marker(pytest.mark.skip(f"not looked at: being other users needs root, and this is {auditor}"))
    if not config.stash[AUDIT].nodes and any("node" in getattr(item, "fixturenames", ()) for item in items):
        raise pytest.UsageError("an audit needs hosts: pytest tests/audit --inventory inventory/prod.py [--limit HOST]")


@pytest.fixture(scope="session")
def audit(request):
    """The run, after every host was asked once."""
    running = request.config.stash[AUDIT]
    running.look()
    return running


@pytest.fixture
def host(node):
    """The node as testinfra has it."""
    return node.host


@pytest.fixture
def result(audit, node, control, record_property):
    """A control judged on a node. "Could not look" ends here, as an error: it is no failure, and never a skip."""
    report = audit.reports[node.name]
    if report.snapshot is None:
        found = unseen(control, audit.unreached[node.name])
    else:
        found = judge(control, report.snapshot, node.spec)
    report.results.append(found)
    record_property("host", node.name)
    record_property("control", control.id)
    record_property("severity", control.severity)
    record_property("outcome", found.outcome.value)
    for catalogue, ids in control.references.ids.items():
        mark = " (inferred)" if control.references.inferred else ""
        record_property(catalogue, ", ".join(ids) + mark)
    if found.outcome is Outcome.ERROR:
        pytest.fail(f"{node.name}: {control.id} {control.title}\n  {found.verdict.actual}", pytrace=False)
    return found


def pytest_sessionfinish(session):
    path = session.config.getoption("--audit-json", None)
    running = session.config.stash.get(AUDIT, None)
    if path and running:
        write(Path(path), list(running.reports.values()))
