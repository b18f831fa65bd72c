"""Every family goes through a whole run: proofs, steps with the router's losses, looks at it, a save, an end."""

from pathlib import Path

import families
import pytest
import tiny
from rich.console import Console

from gatewright.train import loop

MOE = {
    "router__train": True,
    "router__balance": 0.05,
    "router__z": 0.001,
    "router__guard__every_steps": 2,
    "router__guard__probe_tokens": 200,
}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_whole_run(tmp_path: Path, name: str) -> None:
    base = tmp_path / f"base-{name}"
    families.save_family(name, base, vocab_size=272)
    tiny.save_tokenizer(base)
    tiny.save_rows(tmp_path / "train.jsonl", 30)
    adapter: dict[str, object] = {"method__adapter__targets": list(families.FAMILIES[name].targets)}
    settings: dict[str, object] = MOE if "experts" in families.FAMILIES[name].targets else {}
    run = tiny.make_run(tmp_path, name, train__steps=3, **adapter | settings)
    assert loop.train(run, console=Console(quiet=True)) == 0
    steps = tiny.events(run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    rounded = tiny.make_run(
        tmp_path, name, run="rounded", model__dtype="bfloat16", train__steps=1, **adapter | settings
    )
    assert loop.train(rounded, console=Console(quiet=True)) == 0
    assert tiny.events(rounded, "step")[0]["loss"] == pytest.approx(steps[0]["loss"], rel=5e-2)
    assert (run.folder / "adapter" / "adapter_model.safetensors").is_file()
    if settings:
        assert all(step["balance_loss"] > 0.5 and step["z_loss"] > 0 for step in steps)
        assert tiny.events(run, "router_health")[0]["step"] == 0
