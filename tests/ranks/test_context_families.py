"""Which architectures may cut documents over ranks: the proof before step 1 passes them, or refuses with the reason."""

from pathlib import Path

import families
import pytest
import torch
from processes import on_ranks

from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.parallel.layout import Layout
from gatewright.parallel.place import Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError
from gatewright.train.context import prove_context

CPU = torch.device("cpu")
PROVED = ["llama", "mistral", "qwen3", "phi3", "mixtral", "olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
PROVED += ["glm4_moe"]
REFUSED = {
    "qwen3_next": "carry something along a document",
    "lfm2": "carry something along a document",
    "falcon_h1": "carry something along a document",
    "deepseek_v32": "carry something along a document",
    "gpt_oss": "sinks",
    "gemma2": "soft caps",
    "llama4": "temperature grows with the place",
}


def said_on_this_rank(place: Place, folders: dict[str, Path]) -> dict[str, str]:
    """What the proof says of each family; nothing where it passes."""
    torch.set_num_threads(1)
    said = {}
    with join_ranks(place, Layout(ranks=place.size), device=CPU, timeout_s=60) as ranks:
        for name, folder in folders.items():
            model = load_model(
                spec.Model(path=str(folder), dtype="float32"), device=CPU, kernel=choose_kernel(CPU, torch.float32)
            )
            try:
                prove_context(model.eval(), ranks)
                said[name] = ""
            except ModelError as error:
                said[name] = str(error)
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_family_is_proved_or_refused(tmp_path: Path, ranks: int) -> None:
    folders = {name: tmp_path / name for name in [*PROVED, *REFUSED]}
    for name, folder in folders.items():
        families.save_family(name, folder)
    for said in on_ranks(ranks, tmp_path / "ranks", said_on_this_rank, folders):
        assert {name for name in folders if not said[name]} == set(PROVED)
        for name, words in REFUSED.items():
            assert words in said[name], f"{name}: {said[name]}"
