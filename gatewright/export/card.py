"""What lies beside the exported files for people and programs: a model card, and an Ollama Modelfile. Pure text."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 1024**3


def licence_of(base: Path) -> str:
    """The licence that the base model's folder states, in its card, provenance or licence file."""
    card = base / "README.md"
    if card.is_file() and (found := re.search(r"^license:\s*(\S+)", card.read_text(encoding="utf-8"), re.MULTILINE)):
        return found[1]
    provenance = base / "PROVENANCE.json"
    if provenance.is_file():
        stated = json.loads(provenance.read_text(encoding="utf-8")).get("licence")
        if stated:
            return str(stated)
    files = sorted(file.name for file in base.iterdir() if re.match(r"(LICEN[CS]E|NOTICE)", file.name, re.IGNORECASE))
    return f"see {', '.join(files)}" if files else "not stated in the base model's folder"


def origin_of(base: Path) -> str:
    """What the base model is called where it was published: from its provenance, config, or else its folder's name."""
    stated: dict[str, Any] = {}
    for name in ("config.json", "PROVENANCE.json"):
        if (base / name).is_file():
            stated |= json.loads((base / name).read_text(encoding="utf-8"))
    named = stated.get("origin") or stated.get("_name_or_path") or ""
    return named if re.fullmatch(r"[\w.-]+/[\w.-]+", str(named)) else base.resolve().name


def training_figures(run_folder: Path) -> dict[str, Any]:
    """Steps, tokens, losses and answers of a run, from its event log."""
    found: dict[str, Any] = {}
    tokens = 0
    for line in (run_folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            tokens += event["tokens"]
            found |= {"steps": event["step"], "tokens": tokens, "train_loss": event["loss"]}
        elif event["kind"] == "evaluate":
            found.setdefault("heldout_loss_before", event["loss"])
            found["heldout_loss"] = event["loss"]
            if event["asked"]:
                found.setdefault("exact_before", f"{event['correct']} of {event['asked']}")
                found["exact"] = f"{event['correct']} of {event['asked']}"
        elif event["kind"] == "model":
            found |= {"architecture": event["architecture"], "parameters": event["parameters"]}
    return found


def model_card(manifest: Mapping[str, Any]) -> str:
    """README.md of the result folder, in Markdown with the front matter that model hubs read."""
    base, adapter = manifest["base"], manifest.get("adapter")
    licence = base["licence"]
    lines = [
        "---",
        f"license: {'other' if licence.startswith(('see', 'not')) else licence.lower()}",
        f"base_model: {base['origin']}",
        "library_name: gguf" if manifest["files"] else "library_name: transformers",
        "---",
        "",
        f"# {manifest['name']}",
        "",
        f"Base model: {base['origin']}. Its licence ({licence}) holds for this model too.",
    ]
    if adapter:
        lines += [
            f"Fine-tuned with an adapter of rank {adapter['rank']}, alpha {adapter['alpha']:g}, "
            + ("merged in float32." if manifest["merge"] else "which is a file of its own here.")
        ]
    lines += [*_training(manifest), *_table(manifest), *_experts(manifest)]
    lines += [f"\n{note[0].upper()}{note[1:]}." for note in manifest["notes"]]
    lines += [
        "",
        f"Everything above was measured; `manifest.json` has all figures, hashes and versions ({_made(manifest)}).",
        "",
    ]
    return "\n".join(lines)


def modelfile(
    file: str, *, adapter: str | None, chat_template: str | None, stops: Sequence[str], context_tokens: int
) -> str:
    """An Ollama Modelfile. Ollama knows many templates by the GGUF file's own; ChatML is written out."""
    lines = [f"FROM ./{file}"]
    if adapter:
        lines.append(f"ADAPTER ./{adapter}")
    if chat_template and "<|im_start|>" in chat_template:
        lines.append(
            'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}'
            '<|im_start|>assistant\n"""'
        )
    lines += [f'PARAMETER stop "{stop}"' for stop in stops]
    lines.append(f"PARAMETER num_ctx {context_tokens}")
    return "\n".join(lines) + "\n"


def _training(manifest: Mapping[str, Any]) -> list[str]:
    training = manifest.get("training")
    if not training:
        return []
    words = {
        "architecture": "architecture",
        "parameters": "parameters",
        "data": "data",
        "steps": "steps",
        "tokens": "tokens trained on",
        "train_loss": "loss of the last step",
        "heldout_loss_before": "held-out loss before",
        "heldout_loss": "held-out loss after",
        "exact_before": "held-out answers right before",
        "exact": "held-out answers right after",
    }
    training = training | {"data": Path(training["data"]).name}
    rows = [f"| {label} | {_plain(training[key])} |" for key, label in words.items() if key in training]
    return ["", "## Training", "", "| | |", "|---|---|", *rows]


def _table(manifest: Mapping[str, Any]) -> list[str]:
    if not manifest["files"]:
        return []
    head = (
        "| file | GiB | KL mean (base's) | KL median (base's) | KL p99 (base's) | same first choice | perplexity "
        "| same answers | verdict |"
    )
    rows = ["", "## Files", "", head, "|---|---|---|---|---|---|---|---|---|"]
    for entry in manifest["files"]:
        figures, floor = entry["figures"], entry.get("base_figures")
        divergences = (_beside(figures, floor, key) for key in ("kl_mean", "kl_median", "kl_p99"))
        rows.append(
            f"| {entry['file']} | {figures['file_bytes'] / GIB:.2f} | {' | '.join(divergences)} | "
            f"{figures['top1']:.1%} | {figures['perplexity']:.2f} ({figures['reference_perplexity']:.2f}) | "
            f"{figures['same_answers']} of {figures['answers']} | {'passed' if entry['passed'] else 'FAILED'} |"
        )
    compared = manifest["data"]["comparison"]
    rows += [
        "",
        f"Over {manifest['files'][0]['figures']['tokens']:,} positions of {Path(compared['source']).name}, prompts "
        "included. KL is of the original model in float32 from the file, in nats; in brackets, what the base model "
        "loses in the same type. After the perplexity, the original's.",
    ]
    return rows


def _experts(manifest: Mapping[str, Any]) -> list[str]:
    experts = manifest.get("experts")
    if not experts:
        return []
    used = experts["experts"] - experts["silent"]
    rest = "; the others got no token in it and are unproven by it" if experts["silent"] else ""
    return ["", f"The comparison used {used} of {experts['experts']} routed experts{rest}."]


def _beside(figures: Mapping[str, Any], floor: Mapping[str, Any] | None, key: str) -> str:
    return f"{figures[key]:.2g}" + (f" ({floor[key]:.2g})" if floor else "")


def _made(manifest: Mapping[str, Any]) -> str:
    versions = manifest["versions"]
    return f"gatewright {versions['gatewright']}, llama-cpp-python {versions['llama.cpp'].split()[0]}"


def _plain(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
