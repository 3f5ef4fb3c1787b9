"""No setting answers a wrong value in the validator's own words."""

from __future__ import annotations

import typing

import pytest
from pydantic import BaseModel, TypeAdapter

from gpuwright.spec import sentence
from gpuwright.spec.node import NodeSpec


def models(kind, found):
    """Every model below a type, by walking annotations."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in found:
        found.add(kind)
        for field in kind.model_fields.values():
            models(field.annotation, found)
    for part in typing.get_args(kind):
        models(part, found)
    return found


MODELS = sorted(models(NodeSpec, set()), key=lambda model: model.__name__)


def schemas(schema):
    """A core schema and everything in it."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for value in schema.values():
            yield from schemas(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from schemas(value)


def test_every_pattern_has_words():
    patterns = {
        schema["pattern"] if isinstance(schema["pattern"], str) else schema["pattern"].pattern
        for schema in schemas(TypeAdapter(NodeSpec).core_schema)
        if schema["type"] == "str" and schema.get("pattern")
    }
    assert len(patterns) > 5
    assert patterns - set(sentence.PATTERNS) == set(), "say in gpuwright/spec/sentence.py what these mean"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_setting_has_a_description_or_a_type_that_says_all(model):
    assert model.__doc__, f"{model.__name__} needs a docstring"


def test_kinds_of_faults_that_settings_can_have_all_have_sentences():
    """What pydantic calls the faults of the types that the models use (its documentation, 'Validation errors')."""
    types = {schema["type"] for schema in schemas(TypeAdapter(NodeSpec).core_schema)}
    raises = {
        "bool": {"bool_type"},
        "int": {"int_type", "greater_than", "greater_than_equal", "less_than", "less_than_equal"},
        "float": {"float_type", "finite_number"},
        "str": {"string_type"},
        "literal": {"literal_error"},
        "dict": {"dict_type"},
        "tuple": {"tuple_type", "too_short", "too_long"},
        "model": {"model_type"},
        "model-fields": {"missing"},
        "tagged-union": {"union_tag_invalid"},
        "function-after": {"value_error"},
        "function-before": {"value_error"},
    }
    # a plain union's faults are those of its members, told as one (broken/list-in-speculative.yaml)
    silent = {
        "union",
        "nullable",
        "default",
        "any",
        "definitions",
        "definition-ref",
        "model-field",
        "always",
        "function-wrap",
    }
    unknown = types - set(raises) - silent - {"no-info", "with-info", "json", "model", "field"}
    assert unknown == set(), "a new kind of setting: look up its faults and add sentences"
    wanted = set().union(*(raises[kind] for kind in types & set(raises)))
    assert wanted - set(sentence._SENTENCES) == set()
