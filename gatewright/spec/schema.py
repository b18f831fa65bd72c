"""The JSON Schema of the run file; the docs of its keys are the strings below them in spec/run.py."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from typing import Any

from gatewright.spec import run


@cache
def run_schema() -> dict[str, Any]:
    """The schema that pydantic makes, with a description of each key.

    pydantic can collect these too, but does so whenever the classes are imported: a tenth of the time of a short verb.
    """
    schema = run.Run.model_json_schema()
    for section, key, doc in _documented(inspect.getsource(run)):
        properties = (schema if section == "Run" else schema["$defs"].get(section, {})).get("properties", {})
        if key in properties:
            properties[key].setdefault("description", doc)
    return schema


def _documented(source: str) -> list[tuple[str, str, str]]:
    """Class, field and doc, wherever a string stands below an annotated name."""
    return [
        (section.name, field.target.id, inspect.cleandoc(below.value.value))
        for section in ast.parse(source).body
        if isinstance(section, ast.ClassDef)
        for field, below in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    ]
