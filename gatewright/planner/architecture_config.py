"""A Hugging Face config.json, read strictly: sizes are positive integers, gaps filled as transformers fills them."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gatewright.spec.errors import ModelError

CONFIG_LIMIT_BYTES = 16 * 2**20
"""Ten times the largest config.json we know of; anything bigger is some other file."""
LAYER_LIMIT = 10_000
MTP_LIMIT = 64
SIZE_LIMIT = 2**40

DEFAULTS = Path(__file__).parent.parent / "catalog" / "config_defaults.json"
"""Written by `tests/metal/test_tensor_counts.py --write` from transformers' own config classes."""

SPELLINGS: tuple[tuple[str, ...], ...] = (
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"),
    ("max_position_embeddings", "model_max_length"),
    ("layer_types", "layers_block_type"),
)
"""Names that mean the same size in different families; transformers 5.24 renames some when it saves."""
REQUIRED = ("hidden_size", "num_hidden_layers")
"""Left out by no real config: without them the file is not what it claims to be."""


def read_json(path: Path, *, limit_bytes: int = CONFIG_LIMIT_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError for a file that is missing, too big, cut off or no object."""
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise ModelError(
                f"{path} holds {size:,} bytes; a {path.name} has at most {limit_bytes:,}. Point at the right file."
            )
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON, or is cut off: {error}. Fetch the file again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, wanted an object with the model's settings.")
    return value


@cache
def family_defaults() -> dict[str, dict[str, Any]]:
    """What transformers fills in, by model_type."""
    families: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_bytes())["families"]
    return families


def shown(value: object) -> str:
    """A value from the file, short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


class Config:
    """Settings of one text model; every getter raises ModelError that names the file and the key."""

    def __init__(self, values: Mapping[str, Any], *, family: str, where: str) -> None:
        self.values = values
        self.family = family
        self.where = where
        families = family_defaults()
        self.defaults = families.get(str(values.get("model_type"))) or families.get(family, {})
        self.assumed: dict[str, object] = {}
        for key in REQUIRED:
            if self.values.get(key) is None:
                raise ModelError(
                    f"{where} has no {key}: it is cut short, or is not the config of a language model. "
                    "Point at the config.json of the model itself."
                )

    def get(self, key: str) -> Any:
        """The value under any spelling of the key; an absent key (null counts as given) has the family's default."""
        names = (key, *next((names for names in SPELLINGS if key in names), ()))
        given = [self.values[name] for name in names if name in self.values]
        if given:
            return next((value for value in given if value is not None), None)
        value = next((self.defaults[name] for name in names if name in self.defaults), None)
        if value is not None:
            self.assumed[key] = value
        return value

    def size(self, key: str, *, limit: int = SIZE_LIMIT) -> int:
        """An integer of at least 1."""
        value = self.optional_size(key, limit=limit)
        if value is None:
            raise ModelError(f"{self.where} has no {key}, and {self.family} has no default for it.")
        return value

    def optional_size(self, key: str, *, limit: int = SIZE_LIMIT) -> int | None:
        value = self.get(key)
        return None if value is None else self._integer(key, value, least=1, limit=limit)

    def count(self, key: str) -> int:
        """An integer of at least 0; 0 where neither the file nor the family says anything."""
        value = self.get(key)
        return 0 if value is None else self._integer(key, value, least=0, limit=SIZE_LIMIT)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {key} is {shown(value)}, wanted true or false.")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        return value if isinstance(value, str) else None

    def integers(self, key: str) -> list[int] | None:
        """A list of layer indices, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise ModelError(f"{self.where}: {key} is {shown(value)}, wanted a list of integers.")
        return [self._integer(key, entry, least=0, limit=LAYER_LIMIT) for entry in value]

    def per_layer(self, key: str, *, allowed: tuple[str, ...]) -> list[str] | None:
        """One word a layer, each in `allowed`; None where the file leaves the choice to the family's rule."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < self.layers:
            got = len(value) if isinstance(value, list) else shown(value)
            raise ModelError(f"{self.where}: {key} has {got} entries, wanted one for each of {self.layers} layers.")
        for word in value:
            if word not in allowed:
                raise ModelError(f"{self.where}: {key} holds {shown(word)}, wanted one of {', '.join(allowed)}.")
        return value[: self.layers]

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction blocks in the checkpoint."""
        value = self.get("num_nextn_predict_layers")
        return 0 if value is None else self._integer("num_nextn_predict_layers", value, least=0, limit=MTP_LIMIT)

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", limit=LAYER_LIMIT)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Key heads; as many as query heads where the file does not say."""
        kv_heads = self.optional_size("num_key_value_heads") or self.heads
        if self.heads % kv_heads:
            raise ModelError(
                f"{self.where}: num_attention_heads {self.heads} is no multiple of num_key_value_heads {kv_heads}."
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head: its own key, or hidden_size / num_attention_heads."""
        own = self.optional_size("head_dim")
        if own is None and self.hidden % self.heads:
            raise ModelError(
                f"{self.where}: hidden_size {self.hidden} is no multiple of num_attention_heads {self.heads}, "
                "and there is no head_dim."
            )
        return own or self.hidden // self.heads

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {text}")

    def _integer(self, key: str, value: object, *, least: int, limit: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.where}: {key} is {shown(value)}, wanted an integer.")
        if not least <= value <= limit:
            raise ModelError(f"{self.where}: {key} is {shown(value)}, wanted {least} to {limit:,}.")
        return value
