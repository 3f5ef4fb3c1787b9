"""Settings of role `kernel`: words of the command line, sysctls, modules, and whether a run may reboot."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpuwright import boot
from gpuwright.spec.base import Seconds, Strict


def _word(value: str) -> str:
    boot.parse_word(value)
    return value


def _sysctl_name(value: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[A-Za-z0-9_/:@-]+)+", value):
        raise ValueError(
            "a sysctl is named with dots, as in vm.swappiness; a dot within a part is written '/', as in "
            "net.ipv4.conf.eth0/100.rp_filter, and '*' is not read"
        )
    return value


def _sysctl_value(value: str | int) -> str:
    text = str(value)
    if not text.isprintable() or not text.isascii() or text != text.strip() or not text:
        raise ValueError("the value of a sysctl is printable ASCII on one line, without blanks around it")
    return text


def _module(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", value):
        raise ValueError("a module has the name that lsmod shows: letters, digits and '_', without path and .ko")
    return value.replace("-", "_")  # modprobe and lsmod take both for the same


def _option(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]+", value):
        raise ValueError("an option has the name that `modinfo -p` shows: letters, digits and '_'")
    return value


def _option_value(value: str | int) -> str:
    text = str(value)
    if not re.fullmatch(r"[!#-&(-\[\]-~]([ -!#-&(-\[\]-~]*[!#-&(-\[\]-~])?", text):
        raise ValueError("the value of a module option is printable ASCII without quotes and backslashes")
    return text


WordText = Annotated[str, AfterValidator(_word)]
SysctlName = Annotated[str, AfterValidator(_sysctl_name)]
SysctlValue = Annotated[str | int, AfterValidator(_sysctl_value)]
ModuleName = Annotated[str, AfterValidator(_module)]
OptionName = Annotated[str, AfterValidator(_option)]
OptionValue = Annotated[str | int, AfterValidator(_option_value)]
Reason = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f]*$")]


class ExtraWord(Strict):
    """One word of the kernel command line that no role asks for."""

    word: WordText = Field(
        description="as it stands in /proc/cmdline: `transparent_hugepage=madvise`, or a bare `quiet`"
    )
    reason: Reason = Field(description="why; it stands in the boot loader's drop-in and in the plan")


class ExtraSysctl(Strict):
    """One kernel setting below /proc/sys."""

    name: SysctlName = Field(description="with dots, as in `vm.swappiness`")
    value: SysctlValue = Field(description="text or a whole number")
    reason: Reason = Field(description="why; it stands in the drop-in and in the plan")


class ExtraOption(Strict):
    """One option of one module."""

    module: ModuleName = Field(description="as lsmod names it")
    option: OptionName = Field(description="as `modinfo -p` names it")
    value: OptionValue = Field(description="text or a whole number")
    reason: Reason = Field(description="why; it stands in the modprobe.d file and in the plan")


class ExtraBlock(Strict):
    """One module that must never be loaded, in use now or not."""

    module: ModuleName = Field(description="as lsmod names it")
    reason: Reason = Field(description="why; it stands in the modprobe.d file and in the plan")


class KernelSpec(Strict):
    """Boot parameters, kernel settings, modules, and reboots."""

    words: tuple[ExtraWord, ...] = ()
    sysctls: tuple[ExtraSysctl, ...] = Field(
        default=(),
        description="beside those of the node's hardening profile (docs/hardening.md lists them), or in the place of one",
    )
    block_other_gpu_drivers: bool = Field(
        default=True,
        description="nouveau, nova, nova_core and nova_drm never bind a GPU of this node (gpu-node.md 4.1); "
        "only where hardware.gpus.count is not 0",
    )
    kept_modules: dict[ModuleName, Reason] = Field(
        default={},
        description="file systems, protocols and buses that the profile keeps out (docs/hardening.md) and the node needs, each with "
        "its reason; the audit lists them as waived. One that the node uses now is left alone and reported anyway",
    )
    blocked_modules: tuple[ExtraBlock, ...] = ()
    deviations: dict[Literal["modules", "sysctls"], Reason] = Field(
        default={},
        description="what of the profile's this node is left without altogether, each with its reason: all its values, or all its "
        "blocked file systems, protocols and buses; the audit lists their controls as waived",
    )
    module_options: tuple[ExtraOption, ...] = ()
    reboot: Literal["never", "when-needed"] = Field(
        default="never",
        description="`never`: the run says what waits for a reboot, and no engine is started or replaced until then; "
        "`when-needed`: engines are drained and the node is rebooted, once",
    )
    reboot_timeout: Seconds = Field(
        default=1800,
        description="until the node answers again, and from then until it has started what the run reads back; servers with terabytes of memory train it for many minutes",
    )
