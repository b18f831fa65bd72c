"""The page of each rule, made from the rule itself: `python -m gatewright.preflight.pages FOLDER` writes them all."""

import sys
from pathlib import Path

from gatewright.preflight.catalogue import FAMILIES, FAMILY
from gatewright.preflight.fault import Rule

_MEANS = {
    "error": "the run fails, or its result is wasted",
    "warning": "the run works, at a cost or a risk",
    "note": "worth knowing",
}


def page(rule: Rule) -> str:
    """One rule in Markdown: what, why, how to silence it, and the source."""
    fix = "`gatewright check --fix` applies its change." if rule.safe else "Its change is shown, and left to you."
    return (
        f"# {rule.code} {rule.name}\n\n"
        f"{rule.severity.capitalize()}: {_MEANS[rule.severity]}. Family: {FAMILY[rule.code]}.\n\n"
        f"{rule.reason}\n\n"
        f"{fix} To silence it, write `# gatewright: ignore[{rule.code}]` on the line, or give "
        f"`--ignore {rule.code}`.\n\n"
        f"Source: {rule.source}.\n"
    )


def index() -> str:
    """All rules by family."""
    parts = [
        "# Rules of `gatewright check`\n",
        "One page a rule. Written by `python -m gatewright.preflight.pages docs/rules`.\n",
    ]
    for family, rules in FAMILIES:
        parts.append(f"## {family.capitalize()}\n\n| code | name | severity |\n|---|---|---|")
        parts += [f"| [{rule.code}]({rule.code}.md) | {rule.name} | {rule.severity} |" for rule in rules]
        parts[-1] += "\n"
    return "\n".join(parts)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for _, rules in FAMILIES:
        for rule in rules:
            (folder / f"{rule.code}.md").write_text(page(rule), encoding="utf-8")
    (folder / "README.md").write_text(index(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
