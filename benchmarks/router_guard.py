"""A router that collapses, and the guard that saves it: the same fine-tuning with and without, in one run.

A byte-level mixture of experts (4 layers, 16 experts, top-2) is trained from nothing on Python's own library, with a
balance loss, until its router is healthy. Then it is fine-tuned on C++ headers with a router learning rate ten times
too high: once as it is, once under the guard. Both are ordinary runs of `gatewright train`; what is shown comes from
their events. Measured: experts that die and starve on the probe, and the held-out loss.

    python benchmarks/router_guard.py [--steps 300] [--json FILE] [--png FILE]
"""

import argparse
import json
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from gatewright.spec.read import read_run
from gatewright.train.loop import train

DOCUMENT_BYTES = 128
PRETRAINING_STEPS = 1000
HOT = {"train": True, "lr_scale": 10.0}
ACTIONS = ["lower_lr", "rollback", "balance", "freeze"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=300, help="steps of fine-tuning")
    options.add_argument("--pretraining-steps", type=int, default=PRETRAINING_STEPS)
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--folder", type=Path, help="where to work, and to find the base of an earlier time")
    options.add_argument("--json", type=Path)
    options.add_argument("--png", type=Path)
    asked = options.parse_args()
    if asked.folder:
        results = measure(asked.folder, asked)
    else:
        with tempfile.TemporaryDirectory(prefix="router-guard-") as folder:
            results = measure(Path(folder), asked)
    report(results)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    if asked.png:
        draw(results, asked.png)


def measure(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    base = make_base(folder, steps=asked.pretraining_steps)
    write_headers(folder)
    return {
        name: fine_tune(folder, base, name, router, steps=asked.steps, lr=asked.lr)
        for name, router in {
            "frozen": {},
            "without guard": HOT,
            "with guard": HOT | {"guard": {"action": ACTIONS}},
        }.items()
    }


def write_headers(folder: Path) -> None:
    """The C++ of torch's headers, to train on and held out."""
    text = sources(Path(torch.__file__).parent / "include", "*.h")
    documents(folder / "headers.jsonl", text, count=4096, seed=2)
    documents(folder / "headers-held-out.jsonl", text, count=64, seed=3)


def make_base(folder: Path, *, steps: int) -> Path:
    """A healthy mixture of experts, made by our own trainer."""
    finished = folder / "runs" / f"base-{steps}" / "model"
    if finished.exists():
        return finished
    blank = folder / "blank"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=260, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2,
            norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=True,
        ),
        dtype=torch.float32,
    ).save_pretrained(blank)  # fmt: skip
    tokenizer().save_pretrained(blank)
    documents(folder / "python.jsonl", sources(Path(sysconfig.get_path("stdlib")), "*.py"), count=8 * steps, seed=0)
    router = {"train": True, "lr_scale": 1.0, "balance": 0.04, "z": 1e-3}
    run(folder, f"base-{steps}", blank, folder / "python.jsonl", None, router, steps=steps, lr=2e-3)
    return finished


def fine_tune(folder: Path, base: Path, name: str, router: dict[str, Any], *, steps: int, lr: float) -> dict[str, Any]:
    data, held_out = folder / "headers.jsonl", folder / "headers-held-out.jsonl"
    events = run(folder, name.replace(" ", "-"), base, data, held_out, router, steps=steps, lr=lr)
    health, trained = [], 0  # steps that were made, those that a rollback undid too
    for event in events:
        trained += event["kind"] == "step"
        if event["kind"] == "router_health":
            health.append(event | {"step": trained})
    evaluations = [event for event in events if event["kind"] == "evaluate"]
    return {
        "steps": [look["step"] for look in health],
        "dead": [sum(look["dead"]) for look in health],
        "starved": [sum(look["starved"]) for look in health],
        "kl": [sum(look["kl"]) / len(look["kl"]) for look in health],
        "drift": [max(look["drift"]) for look in health],
        "overlap": [sum(look["overlap"]) / len(look["overlap"]) for look in health],
        "loss": {event["step"]: event["loss"] for event in evaluations},
        "actions": [{k: e[k] for k in ("step", "level", "action", "detail")} for e in events if e["kind"] == "guard"],
        "data_steps": [event["data_step"] for event in events if event["kind"] == "step"],
        "look_share": sum(look["seconds"] for look in health[1:])
        / sum(event["step_s"] for event in events if event["kind"] == "step"),
    }


def run(
    folder: Path,
    name: str,
    model: Path,
    data: Path,
    held_out: Path | None,
    router: dict[str, Any],
    *,
    steps: int,
    lr: float,
) -> list[dict[str, Any]]:
    """One run of `gatewright train`; its events."""
    content = {
        "run": name,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(data)},
        "evaluate": {"data": str(held_out)} if held_out else None,
        "train": {
            "tokens_per_step": 8 * DOCUMENT_BYTES, "micro_batch_tokens": 8 * DOCUMENT_BYTES, "steps": steps, "lr": lr,
            "schedule": "constant", "warmup_steps": 10, "save_every_steps": 50, "threads": 1, "seed": 0,
        },
        "router": router,
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    code = train(read_run(file), console=Console(quiet=True))
    assert code == 0, f"exit code {code}"
    lines = (folder / "runs" / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def sources(root: Path, pattern: str) -> str:
    """Source text that is on every machine that can run this, up to 8 MB."""
    text = []
    for file in sorted(root.rglob(pattern))[:1500]:
        if "test" not in file.parts:
            text.append(file.read_bytes()[:20_000].decode("ascii", errors="ignore"))
    return "\n".join(text)


def documents(file: Path, text: str, *, count: int, seed: int) -> None:
    """So many pieces of the text, drawn at random."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            at = draw.randrange(len(text) - DOCUMENT_BYTES)
            out.write(json.dumps({"text": text[at : at + DOCUMENT_BYTES - 1]}) + "\n")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", "<unk>", *alphabet]
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def report(results: dict[str, Any]) -> None:
    print(f"{'':<15}{'held-out loss':>14}{'dead':>8}{'starved':>9}{'KL':>8}{'overlap':>9}   of 64 experts, at the end")
    for name, found in results.items():
        loss = list(found["loss"].values())[-1]
        print(
            f"{name:<15}{loss:>14.4f}{found['dead'][-1]:>8}{found['starved'][-1]:>9}{found['kl'][-1]:>8.3f}"
            f"{found['overlap'][-1]:>9.1%}"
        )
    for name, found in results.items():
        first = next((step for step, dead in zip(found["steps"], found["dead"], strict=True) if dead), None)
        print(f"{name}: first dead expert at step {first}; looks took {found['look_share']:.2%} of the steps' time")
        for acted in found["actions"]:
            print(f"  step {acted['step']:>4}  {acted['level']:<7} {acted['action']:<9} {acted['detail']}")


def draw(results: dict[str, Any], file: Path) -> None:
    """Dead and starved experts over the steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (experts, routing) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, color in (("frozen", "tab:gray"), ("without guard", "tab:red"), ("with guard", "tab:blue")):
        found = results[name]
        experts.plot(found["steps"], found["starved"], color=color, label=f"{name}: starved")
        experts.plot(found["steps"], found["dead"], color=color, linestyle="--", label=f"{name}: dead")
        routing.plot(found["steps"], found["kl"], color=color, label=name)
    for acted in results["with guard"]["actions"]:
        for axes in (experts, routing):
            axes.axvline(acted["step"], color="tab:blue", linewidth=0.7, linestyle=":")
        routing.annotate(
            acted["action"], (acted["step"], routing.get_ylim()[1] * 0.9), rotation=90, va="top", fontsize=8
        )
    experts.set(xlabel="optimizer steps made", ylabel="experts of 64")
    routing.set(xlabel="optimizer steps made", ylabel="KL of the routing from step 0, nats")
    experts.legend(fontsize=8)
    routing.legend(fontsize=8)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
