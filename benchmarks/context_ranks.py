"""Context parallelism for real: the same long-tailed documents on several processes, with CP chosen for each
micro-batch, and with every document cut over all ranks.

Both are ordinary runs of `gatewright train --nproc N` of a small Llama made on the spot; what is shown comes from their
events. Medians over steps, and the ratio of the two, which alternate so that a busy machine troubles both.

    python benchmarks/context_ranks.py [--ranks 2] [--rounds 2] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from documents import long_tailed_lengths
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SETTINGS: dict[str, int | str] = {"dynamic": "dynamic", "static": 0}
"""cp of each; 0: as many as there are ranks."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="context-") as folder:
        results = measure(Path(folder), asked)
    report(results)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    make_model(folder / "model")
    write_documents(folder / "documents.jsonl", long_tailed_lengths(160, seed=0))
    step_s: dict[str, list[float]] = {name: [] for name in SETTINGS}
    tokens: dict[str, list[int]] = {name: [] for name in SETTINGS}
    losses: dict[str, list[float]] = {}
    for round_number in range(asked.rounds):
        for name, size in SETTINGS.items():
            steps = train(
                folder, f"{name}-{round_number}", cp=size or asked.ranks, ranks=asked.ranks, steps=asked.steps
            )
            step_s[name] += [step["step_s"] for step in steps[1:]]
            tokens[name] += [step["tokens"] for step in steps[1:]]
            losses[name] = [step["loss"] for step in steps]
    rate = {
        name: statistics.median(t / s for t, s in zip(tokens[name], step_s[name], strict=True)) for name in SETTINGS
    }
    return {
        "ranks": asked.ranks,
        "tokens_per_s": rate,
        "ratio": rate["dynamic"] / rate["static"],
        "loss_difference": max(abs(a - b) for a, b in zip(losses["dynamic"], losses["static"], strict=True)),
    }


def train(folder: Path, name: str, *, cp: int | str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """One run; its step events."""
    content = {
        "run": name,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "method": {"adapter": {"rank": 8, "targets": ["attention", "mlp"]}},
        "data": {"train": str(folder / "documents.jsonl")},
        "train": {
            "tokens_per_step": 16_384, "micro_batch_tokens": 4096, "steps": steps, "lr": 1e-4, "threads": 1,
            "save_every_steps": 1_000_000, "checkpointing": "full",
        },
        "parallel": {"cp": cp},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    command = [sys.executable, "-m", "gatewright", "train", str(file), "--nproc", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    lines = (folder / "runs" / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = ["<|endoftext|>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", pad_token="<|endoftext|>").save_pretrained(
        folder
    )


def write_documents(file: Path, lengths: list[int]) -> None:
    """One text a length, of about as many bytes, which are tokens here."""
    with file.open("w", encoding="utf-8") as out:
        for number, length in enumerate(lengths):
            text = " ".join(str((number * 7919 + i * i) % 9973) for i in range(length))[: max(1, length - 1)]
            out.write(json.dumps({"text": text}) + "\n")


def report(results: dict[str, Any]) -> None:
    print(f"{results['ranks']} processes, long-tailed documents (median 300, longest 4,096 tokens)")
    for name, rate in results["tokens_per_s"].items():
        print(f"{name:<10}{rate:>10,.0f} tokens/s")
    print(f"dynamic over static: {results['ratio']:.2f} times; losses differ by {results['loss_difference']:.1e}")


if __name__ == "__main__":
    main()
