"""Cross-checks on who may log in: whoever is locked out by a description is told before any host is."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found
from gpuwright.spec.sentence import nearest
from roles.access import keys, sshd

# Accounts of services that a distribution or this repository makes.
_TAKEN = ("bin", "daemon", "nobody", "sshd", "sync", "sys", "www-data", "gpuwright-gateway")


def somebody_can_deploy(spec: NodeSpec) -> Iterator[Found]:
    if spec.access is None:
        return
    if not any(user.sudo == "all" or name == "root" for name, user in spec.access.users.items()):
        sentence = "names nobody who can change the node: give one account 'sudo: all'"
        yield Found(("access", "users"), sentence, show=False)


def accounts_are_people(spec: NodeSpec) -> Iterator[Found]:
    for name, user in spec.access.users.items() if spec.access else ():
        path = ("access", "users", name)
        if name in _TAKEN or name.startswith("systemd-"):
            yield Found(path, "is an account of a service; choose another name", show=False)
        if name == "root" and user.sudo != "none":
            yield Found((*path, "sudo"), "says nothing for root, who needs no sudo; leave it out")
        if name == "root" and _root_login(spec) == "no":
            sentence = (
                f"cannot log in with hardening {spec.hardening}: give an account of its own 'sudo: all', connect as that "
                "one, then take root out"
            )
            yield Found(path, sentence, show=False)


def _root_login(spec: NodeSpec) -> str:
    assert spec.access is not None
    return sshd.keywords(spec.access, spec.hardening).get("PermitRootLogin", "prohibit-password")


def keys_are_keys(spec: NodeSpec) -> Iterator[Found]:
    smallest = keys.SMALLEST_RSA[spec.hardening]
    for name, user in spec.access.users.items() if spec.access else ():
        for index, source in enumerate(user.keys):
            try:
                keys.read(source, smallest)
            except keys.BadKey as error:
                yield Found(("access", "users", name, "keys", index), str(error), show=" " not in source)


def passwords_are_for_users(spec: NodeSpec) -> Iterator[Found]:
    for name in spec.access.password_users if spec.access else ():
        path = ("access", "password_users", name)
        if name == "root":
            yield Found(path, "is refused: root never logs in by password", show=False)
        elif spec.access and name not in spec.access.users:
            sentence = f"is none of access.users{nearest(name, list(spec.access.users))}"
            yield Found(path, sentence, show=False)


def deviations_are_of_the_table(spec: NodeSpec) -> Iterator[Found]:
    known = [keyword.name for keyword in sshd.KEYWORDS] + list(sshd.ALGORITHMS) + ["HostKeyAlgorithms"]
    for name, deviation in spec.access.deviations.items() if spec.access else ():
        path = ("access", "deviations", name)
        if name not in known:
            sentence = f"is no keyword that this role sets{nearest(name, known)}"
            yield Found(path, sentence, show=False)
        if deviation.value is not None and (not deviation.value.strip() or "\n" in deviation.value):
            yield Found((*path, "value"), "must be one line, as sshd_config has it behind the keyword")


RULES = (
    somebody_can_deploy,
    accounts_are_people,
    keys_are_keys,
    passwords_are_for_users,
    deviations_are_of_the_table,
)
