"""Ten configs of each tool, as its users write them: every key is understood, and good ones yield no error."""

from pathlib import Path

import pytest

from gatewright.preflight.check import check

FOLDER = Path(__file__).parent / "foreign_configs"
TOOLS = ("axolotl", "llamafactory", "trl", "transformers", "swift", "deepspeed", "accelerate", "megatron", "sbatch")
CONFIGS = sorted(path for tool in TOOLS for path in (FOLDER / tool).iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=[f"{path.parent.name}/{path.name}" for path in CONFIGS])
def test_a_good_config_is_read_whole_and_yields_no_error(path: Path) -> None:
    verdict = check([path])
    assert [str(unread) for unread in verdict.unread] == []
    assert [(f.code, f.text) for f in verdict.findings if f.severity == "error"] == []
    wanted = {"accelerate": {"accelerate", "fsdp"}, "swift": {"swift", "swift-megatron"}}
    assert set(verdict.tools) & wanted.get(path.parent.name, {path.parent.name})


def test_there_are_ten_configs_of_each_tool() -> None:
    assert {tool: len(list((FOLDER / tool).iterdir())) for tool in TOOLS} == dict.fromkeys(TOOLS, 10)
