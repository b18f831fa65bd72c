"""llama.cpp's own converter: what ours is compared with to the byte, and what other architectures go through."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import export_models
import gguf
import official_models
import pytest
import torch
from rich.console import Console

from gatewright.export.convert import convert
from gatewright.export.official import KNOWN, check_converter, convert_officially
from gatewright.export.pipeline import ExportRequest, Outcome, export
from gatewright.export.quantise import parse_recipes
from gatewright.export.sample import SampleRequest
from gatewright.export.source import find_source
from gatewright.spec.errors import ModelError, RunFailed, UserError

ALL_IN_ONE = """
import runpy, sys
from conversion.base import TextModel
script, precision, *models = sys.argv[1:]
for model in models:
    folder, pre = model.split("=")
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    sys.argv = [script, folder, "--outfile", f"{folder}.official.gguf", "--outtype", precision]
    runpy.run_path(script, run_name="__main__")
"""
STATED_BY_US = {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"}
"""We write that nothing is added; the converter leaves it out, and llama.cpp then goes by the pre-tokenizer's name."""


@pytest.fixture(scope="module")
def converter() -> Path:
    """The script. Fails where it is not, since a comparison that is left out proves nothing."""
    script = official_models.CONVERTER
    if not script.is_file():
        pytest.fail(f"no {script}; `make test` fetches it")
    return script


def convert_all(script: Path, precision: str, models: dict[Path, str]) -> None:
    """Every model by the official converter, in one process, each told its pre-tokenizer."""
    path = os.pathsep.join([str(script.parent / "gguf-py"), str(script.parent)])
    named = [f"{folder}={pre}" for folder, pre in models.items()]
    command = [sys.executable, "-c", ALL_IN_ONE, str(script), precision, *named]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def contents(file: Path) -> tuple[dict[str, object], list[tuple[object, ...]]]:
    """Fields with their types, and tensors in their order with type, shape and bytes."""
    reader = gguf.GGUFReader(file)
    fields = {
        name: (field.types, field.contents()) for name, field in reader.fields.items() if not name.startswith("GGUF.")
    }
    return fields, [(t.name, t.tensor_type, tuple(t.shape), t.data.tobytes()) for t in reader.tensors]


@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_ours_is_the_official_file_to_the_byte(tmp_path: Path, converter: Path, precision: str) -> None:
    """Tensors: order, types, shapes, bytes. Fields: all, with their types."""
    models = {
        export_models.save_base(kind, tmp_path / kind): export_models.tokenizer_of(kind)
        for kind in export_models.CONFIGS
    }
    convert_all(converter, precision, models)
    for folder in models:
        fields, tensors = contents(Path(f"{folder}.official.gguf"))
        name = str(fields["general.name"][1])  # type: ignore[index]
        ours = tmp_path / "ours.gguf"
        convert(folder, ours, precision=precision, name=name, tick=lambda done, total: None)
        our_fields, our_tensors = contents(ours)
        assert our_tensors == tensors, folder.name
        assert our_fields.keys() - fields.keys() <= STATED_BY_US
        assert {key: value for key, value in our_fields.items() if key in fields} == fields, folder.name


def make(folder: Path, kind: str) -> None:
    """A tiny model of that kind, and data."""
    export_models.save_random(official_models.CONFIGS[kind], folder / "base")
    specials = export_models.GLM_SPECIALS if kind == "glm4_moe" else ()
    export_models.save_tokenizer(folder / "base", export_models.tokenizer_of(kind), specials=specials)
    export_models.save_rows(folder / "train.jsonl", 40)


def run(folder: Path, quant: str, script: Path) -> Outcome:
    """The whole way through the official converter."""
    sample = SampleRequest(
        train=folder / "train.jsonl", heldout=None, template=None, calibration_tokens=200, check_tokens=500,
        document_tokens=200, prompts=2, answer_tokens=4,
    )  # fmt: skip
    request = ExportRequest(
        source=find_source(str(folder / "base"), base=None), to="gguf", recipes=parse_recipes(quant),
        out=folder / "out", dtype=torch.float32, sample=sample, threads=1, converter=script,
    )  # fmt: skip
    return export(request, console=Console(file=io.StringIO(), width=200))


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe"])
def test_another_architecture_goes_through_the_official_converter(
    tmp_path: Path,
    converter: Path,
    kind: str,
) -> None:
    make(tmp_path, kind)
    outcome = run(tmp_path, "f16,q8_0", converter)
    assert outcome.passed, outcome.manifest["files"]
    exact, eight = (entry["figures"] for entry in outcome.manifest["files"])
    assert exact["kl_median"] < 1e-5 < eight["kl_median"]
    assert exact["texts_alike"] == exact["texts"], "the pre-tokenizer that the converter does not know by hash"


@pytest.mark.slow
@pytest.mark.parametrize("kind", official_models.CONFIGS)
def test_every_architecture_that_the_docs_name(tmp_path: Path, converter: Path, kind: str) -> None:
    make(tmp_path, kind)
    outcome = run(tmp_path, "f32", converter)
    assert outcome.passed and outcome.manifest["files"][0]["figures"]["kl_median"] < 5e-6


def test_a_wrong_conversion_fails_whatever_is_asked_for(tmp_path: Path, converter: Path) -> None:
    """The official converter takes softmax where nothing says sigmoid; its quantised file alone would not show it."""
    folder = tmp_path
    make(folder, "deepseek_v3")
    outcome = run(folder, "q8_0", converter)
    assert outcome.passed, outcome.manifest["files"]
    config = folder / "base" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"scoring_func": "softmax"}))
    outcome = run(folder, "q8_0", converter)
    [entry] = outcome.manifest["files"]
    failed = [gate for gate in entry["gates"] if not gate["passed"]]
    assert [gate["name"] for gate in failed] == ["median KL of the f16 it was made from"]
    assert entry["file"] == "base-Q8_0.failed.gguf"
    config.write_text(json.dumps({key: value for key, value in values.items() if key != "scoring_func"}))
    with pytest.raises(ModelError, match="no scoring_func"):
        run(folder, "q8_0", converter)


def test_code_that_is_not_known_does_not_run(tmp_path: Path, converter: Path) -> None:
    assert check_converter(converter, wanted=None) in KNOWN
    changed = tmp_path / "llama.cpp"
    (changed / "conversion").mkdir(parents=True)
    script = changed / "convert_hf_to_gguf.py"
    script.write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"not one we know.*--converter-hash ([0-9a-f]{64})") as refusal:
        check_converter(script, wanted=None)
    digest = str(refusal.value).split()[-1]
    assert check_converter(script, wanted=digest) == digest
    (changed / "conversion" / "base.py").write_text("import os")
    with pytest.raises(UserError, match="not one we know"):
        check_converter(script, wanted=digest)
    with pytest.raises(UserError, match="no file"):
        check_converter(tmp_path / "nothing.py", wanted=None)


def test_what_the_converter_says_is_passed_on(tmp_path: Path, converter: Path) -> None:
    base = export_models.save_base("llama", tmp_path / "base", vocabulary=False)
    export_models.save_tokenizer(base, "unknown")
    with pytest.raises(RunFailed, match="BPE pre-tokenizer was not recognized"):
        convert_officially(converter, base, tmp_path / "x.gguf", precision="f16")
    assert not list(tmp_path.glob("x.gguf*"))
