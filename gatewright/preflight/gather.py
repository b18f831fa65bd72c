"""Files in, one Job out: which tool wrote each file, what they name, and what they say together."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from os.path import isfile  # false, and no error, for a name that no file can have
from pathlib import Path
from typing import Any

from gatewright.planner.catalogue import find_gpu, find_shape, gpus
from gatewright.preflight.folder import Folder, is_weights_folder, read_folder
from gatewright.preflight.job import Job, Written
from gatewright.preflight.readers.axolotl import read_axolotl
from gatewright.preflight.readers.engines import FSDP_NAMES, read_accelerate, read_deepspeed, read_fsdp
from gatewright.preflight.readers.huggingface import read_trainer, read_trl
from gatewright.preflight.readers.llamafactory import read_llamafactory
from gatewright.preflight.readers.megatron import read_megatron
from gatewright.preflight.readers.ours import read_ours
from gatewright.preflight.readers.script import read_shell
from gatewright.preflight.readers.swift import read_swift, read_swift_megatron
from gatewright.preflight.reading import Reading, Unread
from gatewright.preflight.source import Leaf, Source, UnreadableFile, leaves, read_document, read_source
from gatewright.spec.errors import GatewrightError
from gatewright.spec.hardware import Gpu
from gatewright.spec.probe import Probe, read_probe
from gatewright.spec.shape import ModelShape

SAME_MEMORY = 0.05
MAX_FILES = 40
"""Files read in one check, named ones with them."""
_FIELDS = frozenset(item.name for item in fields(Job))
_AGREE = ("micro_batch", "accumulation", "lr", "clip_norm", "bf16", "fp16", "max_tokens", "zero", "ep", "tp", "ranks")
"""Values that must be the same wherever they are written."""
_TRL_ONLY_TEXT = """
max_length max_seq_length dataset_text_field packing_strategy assistant_only_loss completion_only_loss
chat_template_path use_peft lora_target_parameters dataset_name eos_token max_prompt_length padding_free
use_bnb_nested_quant
"""
_TRL_ONLY = frozenset(_TRL_ONLY_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What only the caller knows."""

    gpu: str | None = None
    gpus: int | None = None
    """Ranks in all."""
    step_s: float | None = None
    p99_tokens: int | None = None
    versions: tuple[tuple[str, str], ...] = ()
    """(package, version)."""
    probe: Path | None = None
    """probe.json of the machine that the run is for."""


@dataclass(slots=True)
class Gathered:
    """Everything that was read."""

    job: Job
    sources: list[Source] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    not_found: list[Written[str]] = field(default_factory=list)
    """Files that a file names and that are not there."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """(file, what is wrong with it)."""
    twice: list[Unread] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Files and folders that were given or named."""
        read = (*(source.name for source in self.sources), *(folder.name for folder in self.job.folders))
        return (*read, *(name for name, _ in self.unreadable))


def gather(paths: Sequence[Path], *, given: Given) -> Gathered:
    """Read the files and those they name. Raises nothing for what is in a file; that is part of the answer."""
    found = Gathered(job=Job())
    readings: list[Reading] = []
    folders: list[Folder] = []
    waiting: list[tuple[Path, str, Written[str] | None]] = [(path, str(path), None) for path in paths]
    seen: set[Path] = set()
    while waiting and len(seen) < MAX_FILES:
        path, name, named_by = waiting.pop(0)
        try:
            if (whole := path.resolve()) in seen:
                continue
            seen.add(whole)
            if named_by is not None and not isfile(path):
                found.not_found.append(named_by)
                continue
        except (OSError, ValueError, RuntimeError) as error:  # a link to itself, or a name that no file can have
            found.unreadable.append((name[:200], f"{name[:200]!r} names no file: {error}"))
            continue
        try:
            if is_weights_folder(path):
                folders.append(read_folder(path, name))
                continue
            source = read_source(path, name)
            new = read_any(source)
        except OSError as error:
            found.unreadable.append((name, f"{name}: cannot be read: {error.strerror}"))
            continue
        except UnreadableFile as error:
            found.unreadable.append((name, str(error)))
            continue
        found.sources.append(source)
        readings += new
        for reading in new:
            found.unread += reading.unread
            found.twice += reading.written_twice
            waiting += [(*_beside(source, said), said) for said in reading.names]
    found.job = with_folders(together(readings, given), folders)
    return found


def with_folders(job: Job, folders: list[Folder]) -> Job:
    """The base of an adapter, or the model given as a folder, is the model where no file names one."""
    if job.model.value is None:
        for folder in folders:
            said = folder.adapter.get("base_model_name_or_path") if folder.is_adapter else str(folder.path)
            if isinstance(said, str) and (folder.is_adapter or folder.is_model):
                job = replace(job, model=Written(said, "folder", folder.name, default=True))
                break
    return replace(job, folders=tuple(folders), shape=job.shape or _shape(job.model))


def _beside(source: Source, said: Written[str]) -> tuple[Path, str]:
    """A named file, relative to the current folder or to the file that names it."""
    text = said.get("")
    here = Path(text)
    if here.is_absolute() or isfile(here):
        return here, text
    beside = source.path.parent / text
    return (beside, str(beside)) if isfile(beside) else (source.path.parent / here.name, str(beside))


def read_any(source: Source) -> list[Reading]:
    """Readings of one file, by what is in it rather than by what it is called. Raises UnreadableFile."""
    if _is_script(source):
        return read_shell(source)
    document = read_document(source)
    if not isinstance(document.value, dict):
        raise UnreadableFile(f"{source.name} holds no keys; wanted a config such as `learning_rate: 1.0e-4`")
    found = leaves(document)
    reading = _by_keys(frozenset(document.value), found, source.name)
    if reading is None:
        shown = ", ".join(list(document.value)[:5])
        raise UnreadableFile(f"{source.name} is the config of no tool known here (it has {shown[:200]})")
    for mistake in document.mistakes:
        reading.written_twice.append(Unread(mistake.key, source.name, mistake.place.order, mistake.text))
    return [reading]


def _is_script(source: Source) -> bool:
    name = source.path.name
    if name.endswith((".sh", ".sbatch", ".slurm", ".bash", ".job", ".args")):
        return True
    return source.text.startswith("#!") or "\n#SBATCH" in source.text or source.text.startswith("--")


def _by_keys(keys: frozenset[str], found: list[Leaf], file: str) -> Reading | None:
    """The reader for a config with these keys at the top; the most telling key first."""
    if {"model", "data", "train"} <= keys and "run" in keys:
        return read_ours(found, file=file)
    if keys & {"compute_environment", "distributed_type"}:
        return read_accelerate(found, file=file)
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu"} or "bf16.enabled" in {leaf.key for leaf in found}:
        return read_deepspeed(found, file=file)
    if keys & {"base_model", "sequence_len"}:
        return read_axolotl(found, file=file)
    if keys & {"finetuning_type", "cutoff_len", "export_dir"}:
        return read_llamafactory(found, file=file)
    if "model" in keys and keys & {"tensor_model_parallel_size", "expert_model_parallel_size", "global_batch_size"}:
        return read_swift_megatron(found, file=file)
    if "model" in keys and keys & {"tuner_type", "train_type", "rlhf_type", "torch_dtype", "dataset"}:
        return read_swift(found, file=file, verb="rlhf" if "rlhf_type" in keys else "sft")
    if keys & {"tensor_model_parallel_size", "micro_batch_size", "train_iters", "num_layers"}:
        return read_megatron(found, file=file)
    if keys & {"model_name_or_path", "per_device_train_batch_size", "output_dir"}:
        return read_trl(found, file=file) if keys & _TRL_ONLY else read_trainer(found, file=file)
    if keys & (FSDP_NAMES | {f"fsdp_{name}" for name in FSDP_NAMES}):
        return read_fsdp(found, file=file)
    return None


def together(readings: Sequence[Reading], given: Given) -> Job:
    """One job from all readings; what was written wins over a tool's default, and the first file over later ones."""
    values: dict[str, Written[Any]] = {}
    said: dict[str, list[Written[Any]]] = {}
    gpu_names: list[str] = [given.gpu] if given.gpu else []
    env: dict[str, Written[str]] = {}
    versions: dict[str, Written[str]] = {}
    for reading in readings:
        env |= reading.env
        versions |= reading.versions
        for name, written in reading.values.items():
            if name == "gpu":
                gpu_names.append(str(written.value))
                continue
            assert name in _FIELDS, name
            held = values.get(name)
            if held is None or (held.default and not written.default):
                values[name] = written
            if written.given:
                said.setdefault(name, []).append(written)
    if given.gpus is not None and "ranks" not in values:
        values["ranks"] = Written(given.gpus, "--gpus", "given", 0, default=True)
    for package, version in given.versions:
        versions[package] = Written(version, f"{package}==", "given", 0)
    settings: dict[str, Any] = dict(values)
    job = Job(
        **settings,
        tools=frozenset(reading.tool for reading in readings),
        env=env,
        versions=versions,
        secrets=tuple(secret for reading in readings for secret in reading.secrets),
        disagreements=tuple(_disagreements(said)),
        step_s=given.step_s,
        p99_tokens=given.p99_tokens,
        probe=read_probe(given.probe) if given.probe else None,
        probe_file=str(given.probe or ""),
    )
    job = replace(job, shape=_shape(job.model), teacher_shape=_shape(job.teacher))
    if job.lumi:
        gpu_names.append("mi250x-gcd")
    return replace(job, gpu=next(filter(None, map(_gpu, gpu_names)), None) or _measured_gpu(job.probe))


def _measured_gpu(probe: Probe | None) -> Gpu | None:
    """The catalogue's GPU that the probe saw: its name within the device's, its memory the nearest, and near."""
    if probe is None or not probe.devices:
        return None
    device = probe.devices[0]
    words = device.name.lower().replace("_", " ").replace("-", " ").split()
    named = [item for item in gpus() if set(item.name.split("-")[:1]) & set(words)]
    near = [item for item in named if abs(device.total_bytes / item.memory_bytes - 1) < SAME_MEMORY]
    return min(near, key=lambda item: abs(device.total_bytes - item.memory_bytes), default=None)


def _disagreements(said: dict[str, list[Written[Any]]]) -> Iterable[tuple[Written[Any], ...]]:
    for name in _AGREE:
        by_value: dict[object, Written[Any]] = {}
        for written in said.get(name, ()):
            by_value.setdefault(written.value, written)
        if len(by_value) > 1 and len({written.file for written in by_value.values()}) > 1:
            yield tuple(by_value.values())


def _shape(model: Written[str]) -> ModelShape | None:
    """Shape of the model, from its folder or the catalogue; None where neither knows it."""
    if model.value is None:
        return None
    try:
        return find_shape(model.value)
    except (GatewrightError, OSError, json.JSONDecodeError, RecursionError):
        return None


def _gpu(name: str) -> Any:
    try:
        return find_gpu({"mi250": "mi250x-gcd", "a100": "a100-80gb"}.get(name, name))
    except GatewrightError:
        return None
