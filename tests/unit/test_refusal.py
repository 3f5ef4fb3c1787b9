"""What runs on the controller in the middle of a run says no with a sentence: pyinfra prints an exception with its traceback."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def commands():
    """Every function that a module gives to FunctionCommand, by where it is defined."""
    for room in ("gpuwright", "roles"):
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            tree = ast.parse(path.read_text())
            given = {
                call.args[0].id
                for call in ast.walk(tree)
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "FunctionCommand"
                if isinstance(call.args[0], ast.Name)
            }
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef) and function.name in given:
                    yield pytest.param(function, id=f"{path.relative_to(REPOSITORY)}:{function.name}")


FUNCTIONS = list(commands())


def test_there_are_some():
    assert len(FUNCTIONS) >= 8


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_a_command_raises_nothing_of_its_own_and_returns_whether_it_worked(function):
    raised = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Raise)]
    assert raised == [], "return say_no(…) instead"
    assert ast.unparse(function.returns) == "bool", "pyinfra takes anything that is not false for success"
