"""Cross-checks on what is asked of the kernel: of the node file's own words, and of all roles together."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwright import boot, wishes
from gpuwright.spec.fault import SettingPath
from gpuwright.spec.node import NodeSpec
from gpuwright.spec.rules.found import Found


def roles_agree(spec: NodeSpec) -> Iterator[Found]:
    for one, other in boot.clashes(boot.together(wishes.of_roles(spec))):
        blamed = one if one.role == "kernel" != other.role else other
        yield Found(_path(spec, blamed), f"clashes: {boot.clash(one, other)}", show=False)


def _path(spec: NodeSpec, wish: boot.Wish) -> SettingPath:
    """The setting a wish comes from; of another role than kernel the role's own part."""
    if wish.role != "kernel" or spec.kernel is None:
        return (wish.role,)
    for index, word in enumerate(spec.kernel.words):
        if isinstance(wish, boot.Word) and boot.parse_word(word.word) == (wish.key, wish.value):
            return ("kernel", "words", index)
    for index, sysctl in enumerate(spec.kernel.sysctls):
        if isinstance(wish, boot.Sysctl) and (sysctl.key, str(sysctl.value)) == (wish.key, wish.value):
            return ("kernel", "sysctls", index)
    for index, option in enumerate(spec.kernel.module_options):
        if isinstance(wish, boot.ModuleOption) and (option.module, option.option) == (wish.module, wish.name):
            return ("kernel", "module_options", index)
    for index, block in enumerate(spec.kernel.blocked_modules):
        if isinstance(wish, boot.BlockedModule) and block.module == wish.module:
            return ("kernel", "blocked_modules", index)
    return ("kernel",)


RULES = (roles_agree,)
