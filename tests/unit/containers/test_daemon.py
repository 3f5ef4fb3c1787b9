"""daemon.json: what is kept, what is ours, what is refused. Pure functions, no host."""

from __future__ import annotations

import json

import pytest

from roles.containers import daemon
from roles.containers.spec import ContainersSpec

SITE = {
    "exec-opts": ["native.umask=0022", "native.cgroupdriver=systemd"],
    "log-driver": "json-file",
    "log-opts": {"max-size": "100m"},
    "data-root": "/data/docker",
    "default-address-pools": [{"base": "172.80.0.0/16", "size": 24}],
    "registry-mirrors": ["https://mirror.example"],
}


def test_keys_of_others_stay_where_they_are():
    merge = daemon.merge({}, SITE, {"live-restore": True, "log-opts": {"max-file": "5"}})
    assert merge.result == {**SITE, "log-opts": {"max-size": "100m", "max-file": "5"}, "live-restore": True}
    assert list(merge.result) == [*SITE, "live-restore"]
    assert [str(setting) for setting in merge.changes] == ['log-opts.max-file: "5"', "live-restore: true"]
    assert not merge.conflicts


def test_options_of_an_array_are_merged_by_their_name():
    merge = daemon.merge(
        {"exec-opts": ["native.cgroupdriver=systemd"]},
        {"exec-opts": ["native.umask=0022", "native.cgroupdriver=systemd"]},
        {"exec-opts": ["native.cgroupdriver=cgroupfs"]},
    )
    assert merge.result["exec-opts"] == ["native.umask=0022", "native.cgroupdriver=cgroupfs"]
    assert not merge.conflicts and not merge.drifted


def test_entries_of_other_arrays_are_a_set():
    merge = daemon.merge(
        {"registry-mirrors": ["https://old.example"]},
        {"registry-mirrors": ["https://site.example", "https://old.example"]},
        {"registry-mirrors": ["https://new.example"]},
    )
    assert merge.result == {"registry-mirrors": ["https://site.example", "https://new.example"]}


def test_what_we_set_and_no_longer_want_goes_with_its_empty_object():
    applied = {"log-opts": {"max-size": "1"}, "features": {"cdi": True}, "exec-opts": ["a=1"], "debug": True}
    merge = daemon.merge(applied, {**applied, "bip": "10.9.0.1/24"}, {})
    assert merge.result == {"bip": "10.9.0.1/24"}
    assert [str(setting) for setting in merge.changes] == [
        'log-opts.max-size: "1" removed',
        "features.cdi: true removed",
        'exec-opts[a]: "a=1" removed',
        "debug: true removed",
    ]


def test_what_we_set_and_the_site_changed_since_stays_when_no_longer_wanted():
    merge = daemon.merge({"debug": True}, {"debug": False}, {})
    assert merge.result == {"debug": False}
    assert [setting.name for setting in merge.kept] == ["debug"]
    assert not merge.changes


@pytest.mark.parametrize(("live", "drifted"), [({"ip": "0.0.0.0"}, ["ip"]), ({}, ["ip"]), ({"ip": "127.0.0.1"}, [])])
def test_ours_changed_by_somebody_is_put_back_and_reported(live, drifted):
    merge = daemon.merge({"ip": "127.0.0.1"}, live, {"ip": "127.0.0.1"})
    assert merge.result == {"ip": "127.0.0.1"}
    assert [setting.name for setting in merge.drifted] == drifted


def test_a_new_wish_for_a_key_of_ours_is_neither_drift_nor_conflict():
    merge = daemon.merge(
        {"log-opts": {"max-size": "1"}}, {"log-opts": {"max-size": "1"}}, {"log-opts": {"max-size": "2"}}
    )
    assert merge.result == {"log-opts": {"max-size": "2"}}
    assert (merge.drifted, merge.conflicts) == ((), ())


def test_a_value_that_was_never_ours_is_a_conflict_and_stays():
    merge = daemon.merge({}, SITE, {"data-root": "/var/lib/docker", "log-opts": {"max-size": "64"}})
    assert merge.result == SITE
    assert {(setting.name, setting.live, setting.wanted) for setting in merge.conflicts} == {
        ("data-root", "/data/docker", "/var/lib/docker"),
        ("log-opts.max-size", "100m", "64"),
    }


def test_true_is_not_one_and_five_is_not_a_string():
    merge = daemon.merge({}, {"debug": 1, "log-opts": {"max-file": 5}}, {"debug": True, "log-opts": {"max-file": "5"}})
    assert [setting.name for setting in merge.conflicts] == ["debug", "log-opts.max-file"]


def test_a_merged_file_merges_to_itself():
    wanted = daemon.wanted(ContainersSpec(data_root="/data/docker"), gpus=2, version=(26, 1))
    del wanted["log-opts"]["max-size"]
    once = daemon.merge({}, SITE, wanted)
    twice = daemon.merge(wanted, daemon.parse(once.text), wanted)
    assert not once.conflicts
    assert (twice.result, twice.changes) == (once.result, ())


@pytest.mark.parametrize(
    ("live", "wanted", "sentence"),
    [
        ({"log-opts": "max-size=1"}, {"log-opts": {"max-size": "1"}}, "log-opts in /etc/docker/daemon.json is a string, and an object is wanted"),
        ({"exec-opts": {}}, {"exec-opts": ["a=1"]}, "exec-opts in /etc/docker/daemon.json is an object, and an array is wanted"),
        ({"ip": ["127.0.0.1"]}, {"ip": "127.0.0.1"}, "ip in /etc/docker/daemon.json is an array, and a string is wanted"),
        ({"log-opts": None}, {"log-opts": {"a": "1"}}, "log-opts in /etc/docker/daemon.json is null, and an object is wanted"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(live, wanted, sentence):
    with pytest.raises(daemon.BrokenDaemonJson) as refused:
        daemon.merge({}, live, wanted)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"debug": true,}', "a comma before the closing '}' (line 1, column 16); remove it"),
        ('{"dns": [1,]}', "a comma before the closing ']'"),
        ('{\n  // ours\n  "debug": true\n}', "a comment in line 2, and JSON has none; remove it"),
        ('{"debug": true} # x', "a comment in line 1, and JSON has none; remove it"),
        ("# x\n{}", "a comment in line 1, and JSON has none; remove it"),
        ("\ufeff{}", "starts with a byte order mark; save it as UTF-8 without one"),
        ("[]", "holds an array, and an object ({...}) is needed"),
        ("null", "holds null, and an object ({...}) is needed"),
        ('{"mtu": NaN}', "has NaN, which JSON does not know"),
        ('{"debug": true, "debug": false}', 'has "debug" twice and dockerd takes the last; remove one'),
        ('{"debug": true', "it ends too early (line 1, column 15)"),
        ("[" * 100_000, "it is nested too deeply"),
        ("{'debug': true}", "expecting property name enclosed in double quotes (line 1, column 2)"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(text, sentence):
    with pytest.raises(daemon.BrokenDaemonJson) as refused:
        daemon.parse(text)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_an_empty_file_is_an_empty_object(text):
    assert daemon.parse(text) == {}


def test_what_is_wanted():
    assert daemon.wanted(ContainersSpec(), gpus=0, version=(20, 10)) == {
        "data-root": "/var/lib/docker",
        "ip": "127.0.0.1",
        "live-restore": True,
        "log-driver": "json-file",
        "log-opts": {"max-size": "67108864", "max-file": "5"},
        "userland-proxy": False,
    }


@pytest.mark.parametrize(("version", "there"), [(None, False), ((23, 0), False), ((24, 0), True), ((26, 1), True)])
def test_a_key_that_an_old_dockerd_refuses_is_left_out(version, there):
    assert ("default-network-opts" in daemon.wanted(ContainersSpec(), version=version)) is there


def test_cdi_is_switched_on_where_there_are_gpus():
    assert daemon.wanted(ContainersSpec(), gpus=4)["features"] == {"cdi": True}
    assert "features" not in daemon.wanted(ContainersSpec(), gpus=0)


def test_further_keys_are_laid_over_ours():
    spec = ContainersSpec(daemon={"log-opts": {"compress": "true"}, "features": {"buildkit": True}})
    wanted = daemon.wanted(spec, gpus=1)
    assert wanted["log-opts"] == {"max-size": "67108864", "max-file": "5", "compress": "true"}
    assert wanted["features"] == {"cdi": True, "buildkit": True}


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        ("/usr/sbin/dockerd -H fd:// $DOCKER_OPTS", {"hosts": "-H"}),
        ("dockerd --host=tcp://127.0.0.1:2375", {"hosts": "--host"}),
        ("dockerd --containerd=/run/containerd/containerd.sock", {"containerd": "--containerd"}),
        ("dockerd -s overlay2 --data-root /data -D", {"storage-driver": "-s", "data-root": "--data-root", "debug": "-D"}),
        ("dockerd --log-opt max-size=1m --dns 192.0.2.1 --insecure-registry r:5000",
         {"log-opts": "--log-opt", "dns": "--dns", "insecure-registries": "--insecure-registry"}),
        ("dockerd --add-runtime nvidia=x --live-restore", {"runtimes": "--add-runtime", "live-restore": "--live-restore"}),
    ],
)  # fmt: skip
def test_flags_are_known_by_the_key_they_set(command, keys):
    assert daemon.keys_of_flags(command.split()) == keys


def test_a_password_in_a_proxy_address_is_not_shown():
    assert daemon.show({"http-proxy": "http://me:pw@proxy:3128"}) == '{"http-proxy": "http://***@proxy:3128"}'


def test_the_text_is_json_with_a_final_newline():
    text = daemon.merge({}, {}, {"debug": True}).text
    assert text.endswith("}\n")
    assert json.loads(text) == {"debug": True}
