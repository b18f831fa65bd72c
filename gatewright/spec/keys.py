"""The keys of a run file as a table: what may be written under each, in words, and the nearest key to a wrong one."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gatewright.spec.schema import run_schema

Schema = Mapping[str, Any]
"""A JSON Schema, or a part of one."""

FOREIGN_NAMES = {
    "base_model": "model.path",
    "model_name_or_path": "model.path",
    "model_id": "model.path",
    "torch_dtype": "model.dtype",
    "precision": "model.dtype",
    "bf16": "model.dtype",
    "load_in_4bit": "method.quantize",
    "lora_r": "method.adapter.rank",
    "lora_rank": "method.adapter.rank",
    "r": "method.adapter.rank",
    "lora_alpha": "method.adapter.alpha",
    "lora_dropout": "method.adapter.dropout",
    "target_modules": "method.adapter.targets",
    "lora_target": "method.adapter.targets",
    "use_rslora": "method.adapter.rslora",
    "lora": "method.adapter",
    "dataset": "data.train",
    "train_file": "data.train",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "max_length": "data.max_tokens",
    "sequence_len": "data.max_tokens",
    "cutoff_len": "data.max_tokens",
    "packing": "data.pack",
    "sample_packing": "data.pack",
    "eval_steps": "evaluate.every_steps",
    "batch_size": "train.tokens_per_step",
    "global_batch_size": "train.tokens_per_step",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "micro_batch_size": "train.micro_batch_tokens",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "learning_rate": "train.lr",
    "lr_scheduler": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup_steps",
    "num_warmup_steps": "train.warmup_steps",
    "max_grad_norm": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "gradient_checkpointing": "train.checkpointing",
    "adam_epsilon": "train.eps",
    "optim": "train.optimizer",
    "save_steps": "train.save_every_steps",
    "save_total_limit": "train.keep_checkpoints",
    "async_save": "train.save_in_background",
    "router_aux_loss_coef": "router.balance",
    "expert_parallel_size": "parallel.ep",
    "context_parallel_size": "parallel.cp",
    "deepspeed": "parallel.dense",
    "fsdp": "parallel.dense",
    "report_to": "track",
    "output_dir": "runs_dir",
    "name": "run",
    "run_name": "run",
}
"""Names that other trainers give to what a key of ours says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the run file; items of a list have `*` as the last part of their path."""

    path: str
    wanted: str
    """What may be written there, as the end of the sentence "wanted ..."."""
    doc: str
    choices: tuple[str, ...]
    """Words that may be written there."""
    patterns: tuple[str, ...]
    """Regular expressions one of which a text must match; none: any text will do."""
    kinds: frozenset[str]
    """JSON types that may be written there."""
    keys: tuple[str, ...]
    """Names below it, if it is a section."""
    required: tuple[str, ...]
    """Those of them that have no default."""


@cache
def run_keys() -> dict[str, Key]:
    """Every key by its dotted path; the run file itself is ''."""
    schema = run_schema()
    return {key.path: key for key in _walk(schema, "", schema["$defs"])}


def choose(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The word most like this one, without regard to case and dashes; None if none is near."""
    plain = {known.lower(): known for known in words}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def suggest(section: str, name: str) -> tuple[str, str | None]:
    """A sentence that helps with an unknown key `name` of `section`, and the dotted key it leads to.

    First a slip of the pen in this section, then another trainer's name, then a key of another section, then
    anything alike; failing all, the section's keys.
    """
    keys = run_keys()
    here = keys[section].keys
    if name in keys and "." in name:
        parent, _, leaf = name.rpartition(".")
        return f"unknown key; dots are for --set: write {leaf} inside the section {parent}", name
    if slip := nearest(name, here, cutoff=0.75):
        return f"unknown key; did you mean {slip}?", _join(section, slip)
    if (ours := FOREIGN_NAMES.get(name.lower().replace("-", "_"))) and ours != section:
        return f"unknown key; here it is {ours} ({_first_sentence(keys[ours].doc)})", ours
    if elsewhere := [path for path in keys if path and path.rpartition(".")[2] == name]:
        return f"unknown key here; did you mean {choose(elsewhere)}?", elsewhere[0]
    if alike := nearest(name, here):
        return f"unknown key; did you mean {alike}?", _join(section, alike)
    leaves = {path.rpartition(".")[2]: path for path in reversed(keys)}
    if far := nearest(name, leaves, cutoff=0.7):
        return f"unknown key; did you mean {leaves[far]}?", leaves[far]
    return f"unknown key; {section or 'the run file'} knows {', '.join(here)}", None


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _first_sentence(doc: str) -> str:
    return doc.split(". ")[0].rstrip(".")


def _walk(schema: Schema, path: str, defs: Schema) -> Iterable[Key]:
    parts = list(_alternatives(schema, defs))
    section: Schema = next((part for part in parts if "properties" in part), {})
    yield Key(
        path=path,
        wanted=choose(dict.fromkeys(_wanted(part, defs) for part in parts)),
        doc=schema.get("description", ""),
        choices=tuple(word for part in parts for word in _choices(part)),
        patterns=tuple(part["pattern"] for part in parts if "pattern" in part),
        kinds=frozenset(part["type"] for part in parts),
        keys=tuple(section.get("properties", ())),
        required=tuple(section.get("required", ())),
    )
    for name, below in section.get("properties", {}).items():
        yield from _walk(below, _join(path, name), defs)
    for part in parts:
        if part["type"] == "array":
            yield from _walk(_item(part), _join(path, "*"), defs)


def _alternatives(schema: Schema, defs: Schema) -> Iterable[Schema]:
    """The schemas one of which must hold, references followed."""
    if "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from _alternatives(part, defs)
    elif "$ref" in schema:
        yield defs[schema["$ref"].rpartition("/")[2]]
    else:
        yield schema


def _choices(schema: Schema) -> list[str]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _item(array: Schema) -> Schema:
    item: Schema = array["prefixItems"][0] if "prefixItems" in array else array["items"]
    return item


def _wanted(schema: Schema, defs: Schema) -> str:
    """A JSON Schema without alternatives, in words."""
    if choices := _choices(schema):
        return choose(choices)
    match schema["type"]:
        case "object":
            names = list(schema["properties"])
            return f"a section (keys: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''})"
        case "array":
            item = " or ".join(_wanted(part, defs) for part in _alternatives(_item(schema), defs))
            return f"a list of {schema['minItems']}, each {item}" if "prefixItems" in schema else f"a list of {item}"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            if "examples" in schema:
                return f"a text such as {choose(schema['examples'])}"
            return "a text that is not empty" if "minLength" in schema else "a text"
        case "integer":
            return "a whole number" + _bounds(schema)
        case kind:
            assert kind == "number", kind
            return "a number" + _bounds(schema)


def _bounds(schema: Schema) -> str:
    """` above 0 and at most 1`: the limits of a number."""
    words = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    if {"minimum", "maximum"} <= schema.keys():
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    bounds = [f"{words[limit]} {schema[limit]:g}" for limit in words if limit in schema]
    return f" {' and '.join(bounds)}" if bounds else ""
