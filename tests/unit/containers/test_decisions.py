"""What the role decides from what it saw. Recorded answers, no host."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import types

import pytest
from pydantic import ValidationError
from pyinfra.api import OperationError

from gpuwright import snapshot, units
from roles import containers as role
from roles.containers import facts, operations
from roles.containers.spec import ContainersSpec

HOST = types.SimpleNamespace(name="gpu-1", print_prefix="[gpu-1] ")
UNIT = (
    "ActiveState=active\nMainPID=321\nNeedDaemonReload=no\nExecStart={ path=/usr/sbin/dockerd ; "
    "argv[]=/usr/sbin/dockerd -H fd:// $DOCKER_OPTS ; ignore_errors=no ; start_time=[n/a] }\n"
)
VERSION = "Docker version 26.1.5+dfsg1, build a72d7cd\n"


def answer(**said: str) -> facts.Docker:
    """The observation as the script prints it, parsed."""
    return facts.parse("\n".join(f"{name} {base64.b64encode(text.encode()).decode()}" for name, text in said.items()))


BLANK = answer()
RUNNING = answer(version=VERSION, unit=UNIT, live="{}", started="{}", info='{"ServerVersion": "26.1.5"}')


def test_a_blank_host_has_nothing():
    assert (BLANK.version, BLANK.active, BLANK.live, BLANK.info) == (None, False, None, None)


def test_a_running_docker_is_read():
    seen = answer(version=VERSION, unit=UNIT, command="/usr/sbin/dockerd\n-H\nfd://\n", holds="docker.io\n", owner="640 root docker\n", guard="aa\nbb\n", table="bb  -\n")  # fmt: skip
    assert (seen.version, seen.active, seen.main_pid) == ((26, 1), True, 321)
    assert seen.arguments[:3] == ("/usr/sbin/dockerd", "-H", "fd://")
    assert seen.holds == {"docker.io"}
    assert seen.owner == ("0640", "root", "docker")
    assert (seen.guard_loaded, seen.guard_table) == (("aa", "bb"), "bb")


@pytest.mark.parametrize(
    ("text", "version"),
    [(VERSION, (26, 1)), ("Docker version 20.10.24+dfsg1, build 297e128", (20, 10)), ("Docker version 29.0.1, build x", (29, 0)), ("", None)],
)  # fmt: skip
def test_versions(text, version):
    assert facts.parse_version(text) == version


def test_the_observation_is_a_section_of_the_snapshot():
    assert facts.CONTAINERS.script in snapshot.script([facts.CONTAINERS]).replace("'\"'\"'", "'")


# --- daemon.json on a host -------------------------------------------------------------------------------------------


def test_a_conflict_says_whose_value_it_is_and_what_to_do():
    seen = dataclasses.replace(RUNNING, live='{"data-root": "/data/docker"}')
    with pytest.raises(OperationError) as refused:
        operations.plan(HOST, seen, ContainersSpec(), gpus=0)
    assert str(refused.value) == (
        'gpu-1: /etc/docker/daemon.json already says data-root = "/data/docker", which gpuwright never set, and the '
        'node file wants "/var/lib/docker"; put the host\'s value into the node file (containers.data_root), or remove '
        "it from /etc/docker/daemon.json. Nothing was written."
    )


def test_a_key_that_the_unit_sets_already_is_refused_before_docker_is():
    seen = dataclasses.replace(RUNNING, live='{"hosts": ["unix:///run/docker.sock"]}')
    with pytest.raises(OperationError, match=r"hosts would be in .* already starts dockerd with -H: Docker would not"):
        operations.plan(HOST, seen, ContainersSpec(), gpus=0)


def test_a_broken_file_stops_the_plan():
    with pytest.raises(OperationError, match=r"^gpu-1: .*a comma before the closing '}'.* Nothing was written\.$"):
        operations.plan(HOST, dataclasses.replace(RUNNING, live='{"a": 1,}'), ContainersSpec(), gpus=0)


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ({"DockerRootDir": "/data/docker", "Containers": 2, "Images": 1}, True),
        ({"DockerRootDir": "/data/docker", "Containers": 0, "Images": 0}, False),
        ({"DockerRootDir": "/var/lib/docker", "Containers": 2, "Images": 1}, False),
        (None, False),  # stopped, to move the data
    ],
)
def test_a_new_data_root_is_refused_while_the_old_one_is_in_use(info, refused):
    seen = dataclasses.replace(RUNNING, info=info)
    if not refused:
        assert operations.plan(HOST, seen, ContainersSpec(), gpus=0).result["data-root"] == "/var/lib/docker"
        return
    with pytest.raises(
        OperationError, match="Docker keeps 2 containers and 1 images in /data/docker, and the node file"
    ):
        operations.plan(HOST, seen, ContainersSpec(), gpus=0)


def test_the_guard_goes_by_the_older_of_the_installed_and_the_running_docker():
    upgraded = dataclasses.replace(RUNNING, version=(28, 1), info={"ServerVersion": "26.1.5+dfsg1"})
    assert upgraded.oldest_version == (26, 1)
    assert dataclasses.replace(upgraded, info=None).oldest_version == (28, 1)
    assert BLANK.oldest_version is None


@pytest.mark.parametrize("record", [None, "", "{", "[]"])
def test_an_unreadable_record_is_no_record(record):
    assert operations.last_applied(dataclasses.replace(BLANK, applied=record)) == {}


# --- starts, reloads, restarts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("started", "live", "action"),
    [
        ("{}", "{}", ("", [])),
        ('{"debug":true}', '{ "debug" : true }', ("", [])),
        ("{}", '{"debug": true}', ("reload", ["debug"])),
        ("{}", '{"live-restore": true, "registry-mirrors": []}', ("reload", ["live-restore", "registry-mirrors"])),
        ('{"log-opts": {"max-size": "1"}}', '{"log-opts": {"max-size": "2"}}', ("restart", ["log-opts"])),
        ("{}", '{"features": {"cdi": true}}', ("restart", ["features"])),
        ("{}", '{"debug": true, "ip": "127.0.0.1"}', ("restart", ["debug", "ip"])),
        ('{"ip": "127.0.0.1"}', None, ("restart", ["ip"])),
        ("{}", "{,}", ("", [])),
    ],
)
def test_only_a_key_that_needs_it_restarts_docker(started, live, action):
    assert operations.activation(dataclasses.replace(RUNNING, started=started, live=live)) == action


def test_a_docker_that_is_down_is_started_and_one_without_a_record_restarted():
    assert operations.activation(dataclasses.replace(RUNNING, active=False))[0] == "start"
    assert operations.activation(dataclasses.replace(RUNNING, started=None))[0] == "restart"


# --- the guard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "wanted"), [(None, True), ((20, 10), True), ((27, 5), True), ((28, 0), False), ((29, 1), False)])  # fmt: skip
def test_the_guard_is_for_docker_before_28(version, wanted):
    assert operations.guard_wanted(version) is wanted


@pytest.mark.parametrize(
    ("guard", "table", "stale"),
    [
        ("{rules}\nbb\n", "bb  -\n", []),
        ("{rules}\nbb\n", "cc  -\n", [operations.GUARD_UNIT]),  # somebody changed a rule
        ("{rules}\nbb\n", None, [operations.GUARD_UNIT]),  # flushed
        ("old\nbb\n", "bb  -\n", [operations.GUARD_UNIT]),  # killed between change and reload
        (None, "bb  -\n", [operations.GUARD_UNIT]),
    ],
)
def test_a_guard_that_is_not_what_its_rules_made_is_loaded_again(guard, table, stale):
    rules = role.GUARD_FILES[0].data
    said = {} if guard is None else {"guard": guard.format(rules=hashlib.sha256(rules).hexdigest())}
    said |= {} if table is None else {"table": table}
    text = "\n".join(f"{name} {base64.b64encode(value.encode()).decode()}" for name, value in said.items())
    assert operations.guard_is_stale(rules)(snapshot.Snapshot({"containers": (0, text)})) == stale


def test_the_rules_never_touch_those_of_others():
    rules = role.GUARD_FILES[0].data.decode()
    commands = [line for line in rules.splitlines() if line and not line.startswith(("#", "\t", "}"))]
    assert commands == [
        "table inet gpuwright_containers",
        "delete table inet gpuwright_containers",
        "table inet gpuwright_containers {",
    ]


def test_units_and_drop_ins_have_their_keys_in_the_right_section():
    for file in (*role.GUARD_FILES, *role.SERVICE_FILES):
        if file.path.startswith("/etc/systemd"):
            assert units.lint(file.path, file.data.decode()) == []


# --- packages, holds, refusals ---------------------------------------------------------------------------------------


def system(name: str, version: str, codename: str = "x") -> snapshot.System:
    return snapshot.System(name, version, codename, "aarch64", "6.1", "none", False)


def test_the_client_is_a_package_of_its_own_on_debian_13():
    assert "docker-cli" in role.packages(ContainersSpec(), system("debian", "13"))
    assert "docker-cli" not in role.packages(ContainersSpec(), system("debian", "12"))


def test_an_unknown_distribution_is_named_with_what_is_supported():
    with pytest.raises(OperationError, match=r"the host runs fedora-43; supported are debian-12, debian-13, ubuntu"):
        role.packages(ContainersSpec(), system("fedora", "43"))


def test_only_what_is_installed_and_not_held_yet_is_held():
    assert operations.to_hold(["docker.io", "containerd", "bash"], frozenset({"containerd"})) == ["docker.io"]


@pytest.mark.parametrize(
    ("change", "source", "gpus", "present", "sentence"),
    [
        ({"snap": True}, "distribution", 0, {}, "Docker is installed as a snap"),
        ({}, "distribution", 0, {"docker-ce": "5:29"}, "docker-ce 5:29 is installed and the node file wants docker.io"),
        ({}, "docker", 0, {"docker.io": "26"}, "docker.io 26 is installed and the node file wants docker-ce"),
        ({"version": (20, 10), "version_text": "Docker version 20.10.24"}, "distribution", 2, {}, "Docker version 20.10.24 cannot give GPUs to containers through CDI, which needs 25"),
        ({"info": {"Swarm": {"LocalNodeState": "active"}}}, "distribution", 0, {}, "Docker is a member of a swarm"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(change, source, gpus, present, sentence):
    spec = ContainersSpec(source=source, repository_key="key.asc")
    with pytest.raises(OperationError) as refused:
        role.refuse("gpu-1", dataclasses.replace(RUNNING, **change), spec, gpus, present)
    assert str(refused.value).startswith(f"gpu-1: {sentence}")


def test_an_old_docker_is_fine_where_there_are_no_gpus():
    role.refuse("gpu-1", dataclasses.replace(RUNNING, version=(20, 10)), ContainersSpec(), 0, {"docker.io": "20"})


# --- files -----------------------------------------------------------------------------------------------------------


def test_dockers_repository_is_a_source_of_its_own(tmp_path):
    key = tmp_path / "docker.asc"
    key.write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\nx\n")
    spec = ContainersSpec(source="docker", repository="https://mirror.example/docker/", repository_key=str(key))
    written = role.repository_files(spec, system("ubuntu", "24.04", "noble"))
    assert [file.path for file in written] == [
        "/etc/apt/keyrings/gpuwright-docker.asc",
        "/etc/apt/sources.list.d/gpuwright-docker.sources",
    ]
    assert written[1].data.decode().splitlines()[1:] == [
        "Types: deb",
        "URIs: https://mirror.example/docker/ubuntu",
        "Suites: noble",
        "Components: stable",
        "Architectures: arm64",
        "Signed-By: /etc/apt/keyrings/gpuwright-docker.asc",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"), [(None, "cannot be read: No such file or directory"), ("\x99\x01", "is not an ASCII-armoured")]
)  # fmt: skip
def test_a_repository_key_that_is_none_is_refused(tmp_path, content, sentence):
    key = tmp_path / "docker.asc"
    if content:
        key.write_text(content)
    spec = ContainersSpec(source="docker", repository_key=str(key))
    with pytest.raises(OperationError, match=sentence):
        role.repository_files(spec, system("debian", "13"))


def test_a_registry_brings_its_authority_and_never_a_private_key(tmp_path):
    pem = tmp_path / "ca.pem"
    pem.write_text("-----BEGIN CERTIFICATE-----\n")
    spec = ContainersSpec(registries=({"host": "registry.example:5000", "ca": str(pem)},))
    assert [file.path for file in role.authorities(spec.registries)] == [
        "/etc/docker/certs.d/registry.example:5000/ca.crt"
    ]
    pem.write_text("-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(OperationError, match="nothing secret"):
        role.authorities(spec.registries)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "docker"}, "source docker needs repository_key"),
        ({"daemon": {"hosts": ["fd://"]}}, "hosts: docker.service starts dockerd with -H"),
        ({"daemon": {"data-root": "/x"}}, "data-root: write containers.data_root"),
        ({"daemon": {"live-restore": False}}, "live-restore: it is always on"),
        ({"daemon": {"log-opts": {"max-size": "1"}}}, "log-opts.max-size: write containers.log_max_size"),
        ({"daemon": {"log-opts": {"compress": True}}}, "log-opts.compress: Docker takes only strings here"),
        ({"daemon": {"log-opts": "x"}}, "log-opts: an object is needed"),
        ({"registries": [{"host": "https://r.example", "ca": "x"}]}, "a registry is host or host:port"),
        ({"registries": [{"host": "../../etc", "ca": "x"}]}, "a registry is host or host:port"),
        ({"repository": "download.example"}, "a package repository is an address"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_load(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ContainersSpec.model_validate(settings)


def test_the_record_of_what_was_applied_is_plain_json():
    from roles.containers import daemon

    wanted = daemon.wanted(ContainersSpec(), gpus=1, version=(26, 1))
    assert json.loads(json.dumps(wanted)) == wanted
