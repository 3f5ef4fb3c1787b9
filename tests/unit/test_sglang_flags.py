"""How SGLang's flag table is read from its package: the rules of its arg_utils, on a package small enough to see through."""

from __future__ import annotations

import json
import zipfile

import pytest

from lab.engines.sglang import flags

FIELDS = """
class Parallel(msgspec.Struct):
    _NS_PATH = "parallel"
    tp_size: A[int, Arg(help="h", aliases=["--tensor-parallel-size"])] = 1
    host: A[str, "help"] = "127.0.0.1"
    max_tokens: A[Optional[int], Arg(help="h", type_parser=human_readable_int)] = None
    enable_it: A[bool, "help"] = False
    either_way: A[bool, Arg(help="h", action=argparse.BooleanOptionalAction)] = True
    backend: A[Optional[str], Arg(help="h", cli_name="--gemm-backend", choices=BACKENDS + ["extra"])] = None
    graph: A[str, Arg(help="h", choices=Backend.ALL)] = "full"
    mode: A[Literal["a", "b"], "help"] = "a"
    sizes: A[Optional[List[int]], "help"] = None
    names: A[Optional[List[str]], Arg(help="h", type_parser=json_list_type)] = None
    maybe: A[str, Arg(help="h", nargs="?")] = ""
    hidden: A[bool, Arg(no_cli=True)] = False
    plain: int = 3
"""
SERVER = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--reasoning-parser", type=str, choices=["auto"] + names())
        parser.add_argument("--tool-call-parser", type=str, choices=["auto"] + names())
        parser.add_argument("--sampling-backend", type=str, choices=some)
        parser.add_argument("--computed", type=str, choices=[one.name for one in modes()])
        parser.add_argument("--old", action=DeprecatedStoreTrueAction, new_flag="--new")
        parser.add_argument("--older", action="store_true")
"""
MODULES = {
    "arg_groups/fields/parallel.py": FIELDS,
    "server_args.py": SERVER,
    "arg_groups/choices.py": 'BACKENDS = ["one", "two"]\nSAMPLING_BACKEND_CHOICES = set(frozenset({"pytorch"}))\n',
    "utils/common.py": "import os\n",
    "model_executor/cuda_graph_config.py": 'class Backend:\n    FULL = "full"\n    OFF = "off"\n    ALL = (FULL, OFF)\n',
    "function_call/parser_names.py": 'TOOL_CALL_PARSER_NAMES = ["glm47"]\n',
    "parser/reasoning_parser_names.py": 'REASONING_PARSER_NAMES = ["glm45"]\n',
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "sglang-9.9.9-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in MODULES.items():
            archive.writestr(f"sglang/srt/{name}", text)
    return path


def test_flags_are_what_the_declarations_make(wheel, capsys):
    table = flags.table(wheel)
    assert (table["version"], len(table["sha256"])) == ("9.9.9", 64)
    assert table["flags"] == {
        "--computed": {"kind": "value"},
        "--either-way": {"kind": "switch"},
        "--enable-it": {"kind": "switch"},
        "--gemm-backend": {"kind": "value", "choices": ["extra", "one", "two"]},
        "--graph": {"kind": "value", "choices": ["full", "off"]},
        "--host": {"kind": "value"},
        "--max-tokens": {"kind": "value"},
        "--maybe": {"kind": "optional"},
        "--mode": {"kind": "value", "choices": ["a", "b"]},
        "--names": {"kind": "value"},
        "--no-either-way": {"kind": "switch"},
        "--old": {"kind": "switch"},
        "--older": {"kind": "switch"},
        "--reasoning-parser": {"kind": "value", "choices": ["auto", "glm45"]},
        "--sampling-backend": {"kind": "value", "choices": ["pytorch"]},
        "--sizes": {"kind": "values"},
        "--tensor-parallel-size": {"kind": "value", "type": "int"},
        "--tool-call-parser": {"kind": "value", "choices": ["auto", "glm47"]},
        "--tp-size": {"kind": "value", "type": "int"},
    }
    assert "--computed: choices are computed" in capsys.readouterr().err


def test_it_is_written_one_flag_a_line(wheel):
    content = flags.table(wheel)
    text = flags.written(content)
    assert json.loads(text) == content
    assert sum(line.startswith('  "--') for line in text.splitlines()) == len(content["flags"])
