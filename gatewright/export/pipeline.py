"""An export from beginning to end: merge, convert, importance, quantise, compare, and the manifest as the last word.

In the result folder:

NAME-Q4_K_M.gguf       a file that passed; .failed.gguf one that did not, .unproven.gguf one not yet compared
reference.npz          what `gatewright verify` compares with, on any machine
manifest.json          hashes, versions, gates, figures; written last
README.md, Modelfile   for people, and for Ollama
work/                  intermediate files and the records of steps; may be deleted when all is done
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console

from gatewright.export.adapter_gguf import write_adapter
from gatewright.export.card import model_card
from gatewright.export.convert import Precision, convert
from gatewright.export.coverage import expert_coverage
from gatewright.export.deltas import AdapterFiles, read_adapter
from gatewright.export.families import FAMILIES, architecture_of, read_config
from gatewright.export.imatrix import load_importance, save_importance
from gatewright.export.manifest import data_read, describe, ollama_file, publish
from gatewright.export.measure import EXACT_KL, Figures, Gate, gates, measure
from gatewright.export.merge import LOST, empty_model, merge
from gatewright.export.official import check_converter, convert_officially
from gatewright.export.quantise import Recipe, quantise
from gatewright.export.reference import load_reference, save_reference
from gatewright.export.sample import SampleRequest, draw
from gatewright.export.source import ExportSource
from gatewright.export.steps import Result, Steps, Tick, file_sha256, write_json
from gatewright.export.study import Sample, load_plain, median_kl, study
from gatewright.export.vocabulary import read_vocabulary
from gatewright.export.weights import WEIGHT_ERROR, worst_weight
from gatewright.model.base_files import base_fingerprint
from gatewright.model.load import check_weights
from gatewright.model.load import read_config as read_hf_config
from gatewright.model.sources import read_format
from gatewright.spec.errors import UserError

SOURCE_OF_QUANTISED: Precision = "f16"
FIGURES_VERSION = 3
"""Of what is measured; figures of another version are measured again."""
MERGE_KL = {torch.float32: 1e-6, torch.float16: EXACT_KL}
"""Median KL of the merged model from the base model with its adapter beside it, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    source: ExportSource
    to: str
    """merged, gguf or adapter-gguf."""
    recipes: list[Recipe]
    out: Path
    dtype: torch.dtype
    """Of the merged safetensors."""
    sample: SampleRequest | None
    """None only for `merged`."""
    converter: Path | None = None
    """llama.cpp's own converter, for architectures that are not ours."""
    converter_hash: str | None = None
    threads: int | None = None
    context_tokens: int = 4096
    """What the Modelfile asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    passed: bool
    manifest: Mapping[str, Any]
    work_bytes: int


def export(request: ExportRequest, *, console: Console) -> Outcome:
    """Does what is asked for, each step once. Raises UserError for what cannot be exported, before anything is done."""
    return _Export(request, console).run()


class _Export:
    def __init__(self, request: ExportRequest, console: Console) -> None:
        self.request, self.console = request, console
        self.source, self.out = request.source, request.out
        self.work = self.out / "work"
        self.notes: list[str] = []

    def run(self) -> Outcome:
        self._refuse()
        self.steps = Steps(self.work, console=self.console)
        model, merging = self._merged()
        manifest = describe(self.source, self.adapter, self.identity, merging, dtype=self.request.dtype)
        if self.request.to == "merged":
            return self._end(manifest, files=[])
        assert self.request.sample is not None
        sample = draw(self.request.sample, model)
        self._study("tuned", model, self.out / "reference.npz", sample, self.identity)
        reference = load_reference(self.out / "reference.npz")
        with_base = self.source.adapter is not None
        if with_base:
            proof = self._study(
                "base", self._dense_base(), self.work / "base.reference.npz", sample, self.base_identity
            )
            manifest["merge_proof"] = proof
        manifest["experts"] = expert_coverage(reference.expert_tokens, self.adapter)
        if architecture_of(model) not in FAMILIES and not all(recipe.converted for recipe in self.request.recipes):
            self._note("quantised without an importance matrix, which is made for our own conversions only")
        files = [self._file(recipe, model, compared=with_base) for recipe in self.request.recipes]
        if self.request.to == "adapter-gguf":  # one file, judged on several bases
            passed = all(entry["passed"] for entry in files)
            place = publish(self.out, self._adapter_file(), f"{self.source.name}-adapter", passed)
            files = [entry | {"file": place.name} for entry in files]
        manifest["reference"] = {"file": "reference.npz", "sha256": file_sha256(self.out / "reference.npz")}
        manifest["data"] = data_read(self.request.sample, sample)
        return self._end(manifest, files=files)

    # --- before ---------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        """All that can be known before hours of work."""
        out = self.out.resolve()
        for kept in filter(None, (self.source.base, self.source.adapter)):
            if out == kept.resolve() or kept.resolve() in out.parents:
                raise UserError(f"--out {self.out} lies in {kept}, which is never written to; choose another folder")
        if self.request.to == "adapter-gguf" and self.source.adapter is None:
            raise UserError("--to adapter-gguf is for adapters; this is a whole model: use --to gguf")
        check_weights(self.source.base)
        if self.request.to == "merged":
            return
        if architecture_of(self.source.base) in FAMILIES or self.request.converter is None:
            config = read_config(self.source.base)
            read_vocabulary(self.source.base, size=int(config.values["vocab_size"]))
        else:
            check_converter(self.request.converter, wanted=self.request.converter_hash)

    @cached_property
    def adapter(self) -> AdapterFiles | None:
        if self.source.adapter is None:
            return None
        return read_adapter(self.source.adapter, empty_model(self.source.base), base=self.source.base)

    @cached_property
    def base_identity(self) -> dict[str, Any]:
        return {"base": base_fingerprint(self.source.base)}

    @cached_property
    def identity(self) -> dict[str, Any]:
        adapter = self.source.adapter
        if adapter is None:
            return self.base_identity
        files = {file.name: file_sha256(file) for file in sorted(adapter.glob("adapter_*"))}
        return self.base_identity | {"adapter": files, "dtype": str(self.request.dtype)}

    @cached_property
    def template(self) -> str | None:
        """The run's own chat template, where it names one."""
        given = self.request.sample.template if self.request.sample else None
        return Path(given).read_text(encoding="utf-8") if given else None

    # --- steps ----------------------------------------------------------------------------------------------------

    def _merged(self) -> tuple[Path, Result]:
        """The folder of the model to export, and what merging did."""
        adapter = self.adapter
        if adapter is None:
            return self._dense_base(), {}
        place = self.out / "merged" if self.request.to == "merged" else self.work / "merged"

        def action(tick: Tick) -> Result:
            result = self._merge_into(place, adapter, tick)
            if self.template:
                (place / "chat_template.jinja").write_text(self.template, encoding="utf-8")
            return result

        result = self.steps.run("merge", "merge", self.identity, lambda: [place], action)
        if result["lost"] > LOST:
            self._note(
                f"as {str(self.request.dtype).removeprefix('torch.')}, the merged weights lose {result['lost']:.0%} "
                f"of the update (median over tensors), and {result['unchanged']:.0%} of the values stay the base's; "
                "--dtype f32 loses nothing"
            )
        return place, result

    def _dense_base(self) -> Path:
        """The base model in plain floats: itself, or a copy where it is stored in few bits."""
        base = self.source.base
        place = self.out / "merged" if self.adapter is None and self.request.to == "merged" else self.work / "dense"
        if read_format(read_hf_config(base), source=str(base)) is None and place.parent != self.out:
            return base
        nothing = AdapterFiles(folder=base, base=str(base), low_rank={}, replaced={}, tied={}, config={})
        self.steps.run(
            "dense",
            "plain floats",
            self.base_identity | {"dtype": str(self.request.dtype)},
            lambda: [place],
            lambda tick: self._merge_into(place, nothing, tick),
        )
        return place

    def _merge_into(self, place: Path, adapter: AdapterFiles, tick: Tick) -> Result:
        """The folder gets its name when it is whole; shards of an interrupted attempt at the same merge are kept."""
        partial = place.with_name(place.name + ".partial")
        mark = partial / "made-from.json"
        want = json.dumps([self.identity, str(self.request.dtype)], sort_keys=True)
        if partial.exists() and not (mark.is_file() and mark.read_text(encoding="utf-8") == want):
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        mark.write_text(want, encoding="utf-8")
        made = merge(
            self.source.base, adapter, empty_model(self.source.base), partial, dtype=self.request.dtype, tick=tick
        )
        mark.unlink()
        if place.exists():
            shutil.rmtree(place)
        os.replace(partial, place)
        facts = {"tensors": made.tensors, "updated": made.updated, "bytes": made.bytes}
        return facts | {"lost": made.rounding.lost, "unchanged": made.rounding.unchanged}

    def _study(
        self, side: str, folder: Path, reference_file: Path, sample: Sample, identity: Mapping[str, Any]
    ) -> Result:
        """Reference and importance matrix of a model; for the base, how far it is from ours with its adapter on."""
        matrix_file = self.work / f"{side}.importance.npz"
        adapter = self.source.adapter if side == "base" else None

        def action(tick: Tick) -> Result:
            model = load_plain(folder)
            reference, importance = study(model, folder, sample, tick=tick)
            save_reference(reference, reference_file)
            config = read_config(folder) if architecture_of(folder) in FAMILIES else None
            matrix = (
                {}
                if config is None
                else importance.by_gguf_name(architecture=config.family.architecture, layers=config.layers)
            )
            save_importance(matrix, matrix_file)
            if adapter is None:
                return {}
            unmerged = PeftModel.from_pretrained(model, str(adapter)).eval()
            return {"median_kl": median_kl(unmerged, load_reference(self.out / "reference.npz"))}  # type: ignore[arg-type]

        inputs = {"model": identity, "sample": sample.digest, "tuned": self.identity}
        words = "read the model's answers" if side == "tuned" else "read the base model's answers"
        return self.steps.run(f"study-{side}", words, inputs, lambda: [reference_file, matrix_file], action)

    def _converted(self, side: str, folder: Path, precision: str, identity: Mapping[str, Any]) -> Path:
        """A GGUF file in 16 or 32 bits, among the intermediate files."""
        file = self.work / f"{side}-{precision.upper()}.gguf"

        def action(tick: Tick) -> Result:
            if self.request.converter is not None and architecture_of(folder) not in FAMILIES:
                return {"bytes": convert_officially(self.request.converter, folder, file, precision=precision)}
            name, kind = self.source.name, precision
            made = convert(folder, file, precision=kind, name=name, tick=tick, chat_template=self.template)  # type: ignore[arg-type]
            return {"bytes": made}

        inputs = {"model": identity, "precision": precision, "template": self.template, "name": self.source.name}
        self.steps.run(f"convert-{side}-{precision}", f"convert {side} to {precision}", inputs, lambda: [file], action)
        return file

    def _built(self, side: str, folder: Path, recipe: Recipe, identity: Mapping[str, Any]) -> tuple[Path, Result]:
        """The GGUF file of a recipe, among the intermediate files, and what quantising it met."""
        if recipe.converted:
            return self._converted(side, folder, recipe.level, identity), {}
        source = self._converted(side, folder, SOURCE_OF_QUANTISED, identity)
        matrix_file = self.work / f"{side}.importance.npz"
        file = self.work / f"{side}-{recipe.label}.gguf"

        def action(tick: Tick) -> Result:
            matrix = load_importance(matrix_file)
            made = quantise(source, file, recipe, importance=matrix, tick=tick, threads=self.request.threads)
            return {"fallbacks": made.fallbacks, "tensors": made.tensors}

        inputs = {
            "source": source.stat().st_size, "model": identity, "recipe": recipe.label,
            "matrix": file_sha256(matrix_file), "library": version("llama-cpp-python"),
        }  # fmt: skip
        words = f"quantise {side} to {recipe.label}"
        return file, self.steps.run(f"quantise-{side}-{recipe.label}", words, inputs, lambda: [file], action)

    def _figures(self, side: str, file: Path, reference: Path, recipe: Recipe, adapter: Path | None = None) -> Result:
        def action(tick: Tick) -> Result:
            known = load_reference(reference)
            return measure(file, known, threads=self.request.threads, adapter=adapter, tick=tick).as_dict()

        inputs = {
            "file": file.stat().st_size, "made": file.stat().st_mtime_ns,
            "reference": file_sha256(reference), "figures": FIGURES_VERSION,
            "adapter": file_sha256(adapter) if adapter else None, "library": version("llama-cpp-python"),
        }  # fmt: skip
        return self.steps.run(f"compare-{side}-{recipe.label}", f"compare {side} {recipe.label}", inputs, list, action)

    def _file(self, recipe: Recipe, model: Path, *, compared: bool) -> dict[str, Any]:
        """Makes and judges one file of the result; its entry in the manifest."""
        floor: Result | None = None
        base_file: Path | None = None
        alone = self.request.to == "gguf"
        if compared:
            base_file, quantised = self._built("base", self._dense_base(), recipe, self.base_identity)
            floor = self._figures("base", base_file, self.work / "base.reference.npz", recipe)
        if alone:
            file, quantised = self._built("tuned", model, recipe, self.identity)
            figures = self._figures("tuned", file, self.out / "reference.npz", recipe)
            stem = f"{self.source.name}-{recipe.label}"
        else:
            assert base_file is not None
            file, stem = self._adapter_file(), f"{self.source.name}-adapter"
            figures = self._figures("tuned", base_file, self.out / "reference.npz", recipe, adapter=file)
        made = self._made_gates(recipe, model, file if base_file is None or alone else base_file)
        judged = [*made, *gates(Figures(**figures), exact=recipe.exact, base=Figures(**floor) if floor else None)]
        passed = all(gate.passed for gate in judged)
        published = publish(self.out, file, stem, passed) if alone else file
        if fallbacks := quantised.get("fallbacks"):
            words = ", ".join(f"{count} as {kind}" for kind, count in fallbacks.items())
            self._note(
                f"{published.name}: {sum(fallbacks.values())} of {quantised['tensors']} tensors do not fit the blocks "
                f"of their type and are stored larger ({words})"
            )
        return {
            "file": published.name, "recipe": recipe.label, "sha256": file_sha256(published), "passed": passed,
            "on_base": None if alone else recipe.label,
            "fallbacks": quantised.get("fallbacks", {}), "exact": recipe.exact, "making_gates": len(made),
            "gates": [gate.as_dict() for gate in judged], "figures": figures, "base_figures": floor,
        }  # fmt: skip

    def _made_gates(self, recipe: Recipe, model: Path, file: Path) -> list[Gate]:
        """Of how a quantised file was made, which its own answers beside the base's do not show.

        A conversion that is wrong in the same way for both would pass a comparison of the two.
        """
        if recipe.converted:
            return []
        level = Recipe(level=SOURCE_OF_QUANTISED)
        if self.request.to == "gguf":
            side, adapter = "tuned", None
            source = self._converted(side, model, level.level, self.identity)
        else:
            side, adapter = "base", self._adapter_file()
            source = self._converted(side, self._dense_base(), level.level, self.base_identity)
        exact = self._figures("tuned", source, self.out / "reference.npz", level, adapter=adapter)

        def action(tick: Tick) -> Result:
            worst = worst_weight(file, source)
            return {"where": str(worst), "error": worst.error}

        inputs = {"made": file.stat().st_mtime_ns, "source": source.stat().st_mtime_ns, "figures": FIGURES_VERSION}
        words = f"compare weights of {side} {recipe.label}"
        worst = self.steps.run(f"weights-{side}-{recipe.label}", words, inputs, list, action)
        return [
            Gate(f"median KL of the {level.level} it was made from", exact["kl_median"], EXACT_KL),
            Gate(f"largest error of a weight ({worst['where']})", worst["error"], WEIGHT_ERROR),
        ]

    def _adapter_file(self) -> Path:
        file = self.work / "adapter.gguf"
        assert self.adapter is not None
        adapter = self.adapter
        self.steps.run(
            "adapter", "write the adapter", self.identity, lambda: [file],
            lambda tick: {"bytes": write_adapter(adapter, self.source.base, file, name=self.source.name, tick=tick)},
        )  # fmt: skip
        return file

    # --- after ----------------------------------------------------------------------------------------------------

    def _end(self, manifest: dict[str, Any], *, files: list[dict[str, Any]]) -> Outcome:
        """Cards, then the manifest, which says that all is done."""
        proof = manifest.get("merge_proof")
        limit = MERGE_KL.get(self.request.dtype)
        merged_well = proof is None or limit is None or proof["median_kl"] <= limit
        if proof is not None:
            manifest["merge_proof"] = proof | {"limit": limit, "passed": merged_well}
        passed = merged_well and all(entry["passed"] for entry in files)
        manifest |= {"files": files, "notes": self.notes, "passed": passed}
        for file in self.source.base.iterdir():
            if file.is_file() and file.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")):
                shutil.copyfile(file, self.out / file.name)
        (self.out / "README.md").write_text(model_card(manifest), encoding="utf-8")
        if best := next((entry for entry in reversed(files) if entry["passed"]), None):
            tokens, template = self.request.context_tokens, self.template
            text = ollama_file(self.out, best, base=self.source.base, template=template, context_tokens=tokens)
            (self.out / "Modelfile").write_text(text, encoding="utf-8")
        write_json(self.out / "manifest.json", manifest)
        work_bytes = sum(f.stat().st_size for f in self.work.rglob("*") if f.is_file() and f.stat().st_nlink == 1)
        return Outcome(passed=passed, manifest=manifest, work_bytes=work_bytes)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.console.print(f"[yellow]note:[/yellow] {text}", highlight=False)
