"""Makes the demo's data: procedural tasks with checkable answers, as chats, in a train and a held-out file."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

FOLDER = Path(__file__).parent / "cache"
SYSTEM = "Reply with the answer only."
FIRST_SEED = {"train": 0, "heldout": 1_000_000}
SEEDS_A_FAMILY = 100_000
"""reasoning-gym draws row i of a dataset from seed + i: seeds that are nearer than their rows give the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A generator of reasoning-gym, its settings, and how many rows each file gets from it."""

    generator: str
    rows: dict[str, int]
    settings: dict[str, int]


def family(generator: str, train: int, heldout: int, **settings: int) -> Family:
    return Family(generator=generator, rows={"train": train, "heldout": heldout}, settings=settings)


FAMILIES = [
    family("aiw", 150, 12),
    family("chain_sum", 150, 12, max_terms=2, max_digits=2),
    family("family_relationships", 150, 12, max_family_size=4),
    family("word_sequence_reversal", 150, 12, min_words=3, max_words=6),
    # Three lengths of one task make the long tail: most documents are short, a few many times longer.
    family("needle_haystack", 120, 9, min_num_statements=3, max_num_statements=6),
    family("needle_haystack", 24, 2, min_num_statements=7, max_num_statements=20),
    family("needle_haystack", 4, 1, min_num_statements=40, max_num_statements=52),
    # Never trained: whether what was learnt carries over to a generator with other words.
    family("basic_arithmetic", 0, 12, min_terms=2, max_terms=2, max_digits=1),
]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    asked: set[str] = set()
    for split in ("heldout", "train"):
        rows = [chat(entry) for _, entry in draw(split, asked)]
        random.Random(0).shuffle(rows)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path = FOLDER / f"{split}.jsonl"
        path.write_text(lines, encoding="utf-8")
        print(f"data: {path}, {len(rows)} rows")


def draw(split: str, asked: set[str]) -> Iterator[tuple[ProceduralDataset, dict[str, Any]]]:
    """Yields (generator, entry) of every family, skipping each question that is in `asked`, and adds the rest to it."""
    for index, family in enumerate(FAMILIES):
        seed = FIRST_SEED[split] + index * SEEDS_A_FAMILY
        dataset = reasoning_gym.create_dataset(family.generator, size=SEEDS_A_FAMILY, seed=seed, **family.settings)
        entries = (entry for entry in dataset if entry["question"] not in asked)
        for entry, _ in zip(entries, range(family.rows[split]), strict=False):
            asked.add(entry["question"])
            yield dataset, entry


def chat(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as a row of chat data."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": entry["question"].strip()},
            {"role": "assistant", "content": entry["answer"]},
        ]
    }


if __name__ == "__main__":
    main()
