"""Reads plan.json, as `gatewright plan --json` prints it; apart from plan.py, so that planning loads no validation."""

import json
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gatewright.spec.errors import UserError
from gatewright.spec.plan import Plan

LIMIT_BYTES = 16 * 2**20


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises UserError for one that is missing, too large, or no plan."""
    again = "`gatewright plan RUN.yaml --json` prints one"
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise UserError(f"{path} holds {path.stat().st_size:,} bytes; a plan has at most {LIMIT_BYTES:,}. {again}")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {again}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON, or is cut off; {again}") from None
    try:
        return TypeAdapter(Plan).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise UserError(f"{path} is no plan: {where}: {first['msg'].lower()}; {again}") from None
