"""sbatch scripts and shell scripts: the queue, the launcher, the environment, and the training commands in them."""

import re
from collections.abc import Callable
from pathlib import PurePosixPath

from gatewright.preflight.job import Written
from gatewright.preflight.readers.huggingface import read_trainer, read_trl
from gatewright.preflight.readers.llamafactory import read_llamafactory
from gatewright.preflight.readers.megatron import read_megatron
from gatewright.preflight.readers.swift import read_swift, read_swift_megatron
from gatewright.preflight.reading import NotThat, Reading, Unread, seconds, whole
from gatewright.preflight.shell import Option, Script, Token, options, read_script
from gatewright.preflight.source import Leaf, Source
from gatewright.spec.document import plain_value

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?")
_GPUS = re.compile(r"(?:gres[/:])?gpu(?::(?P<kind>[A-Za-z][\w-]*))?(?::(?P<count>\d+))?(?:\(.*\))?")
_PINNED = re.compile(r"([A-Za-z][\w.-]*)(?:\[[\w,]*\])?==([0-9][\w.+]*)")
_PYTHON = re.compile(r"python[\d.]*")
_SECRET = re.compile(r"(hf_|sk-|ghp_)[A-Za-z0-9_-]{20,}|[0-9a-f]{40}")
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
_KNOWN_DIRECTIVES_TEXT = """
account array begin chdir comment constraint core-spec cpu-bind cpus-per-gpu cpus-per-task dependency distribution
error exclude exclusive export export-file get-user-env gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
gpus-per-task gres hint hold job-name kill-on-invalid-dep licenses mail-type mail-user mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nice no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power prefer priority
profile propagate qos quiet reboot requeue reservation signal sockets-per-node spread-job switches thread-spec
threads-per-core time time-min tmp tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey
"""
_KNOWN_DIRECTIVES = frozenset(_KNOWN_DIRECTIVES_TEXT.split())


def read_shell(source: Source) -> list[Reading]:
    """One reading of the script itself, and one of each training command in it."""
    script = read_script(source)
    reading = Reading("sbatch" if script.directives else "shell", source.name)
    if script.directives:
        reading.values["slurm"] = Written(True, "#SBATCH", source.name, script.directives[0].line)
    for option in script.directives:
        _directive(reading, option)
    _environment(reading, script)
    _habits(reading, script)
    commands: list[Reading] = []
    for command in script.commands:
        commands += _command(reading, command)
    return [reading, *commands]


# --- the queue ------------------------------------------------------------------------------------------------


def _directive(reading: Reading, option: Option) -> None:
    text = option.values[0] if option.values else ""
    leaf = Leaf(f"--{option.key}", text, option.line)
    try:
        _put_directive(reading, option.key, text, leaf)
    except NotThat as wanted:
        why = f"got {text[:60]!r}, wanted {wanted}"
        reading.unread.append(Unread(leaf.key, reading.file, leaf.line, why))
    if option.key not in _KNOWN_DIRECTIVES:
        reading.unread.append(Unread(leaf.key, reading.file, leaf.line, "sbatch has no such option"))


def _put_directive(reading: Reading, key: str, text: str, leaf: Leaf) -> None:
    words = {"partition", "signal", "open-mode", "array", "dependency", "cpu-bind"}
    counts = {"ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task"}
    if key in words:
        reading.put(key.replace("-", "_"), text, leaf)
    elif key in counts:
        reading.put(counts[key], whole(text), leaf)
    elif key == "output":
        reading.put("log", text, leaf)
    elif key == "nodes":
        reading.put("nodes", whole(text.split("-")[0]), leaf)
    elif key == "time":
        reading.put("time_limit_s", seconds(text), leaf)
    elif key in ("exclusive", "cpus-per-gpu"):
        reading.put("asks_cores", True, leaf)
    elif key == "requeue":
        reading.put("requeue", True, leaf)
    elif key == "mem" and text not in ("0", ""):
        match = _MEMORY.fullmatch(text.upper())
        if match is None:
            raise NotThat("a size such as 480G")
        reading.put("memory_bytes", int(match[1]) * _UNITS[match[2] or "M"], leaf)
    elif key in ("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task"):
        reading.put("asks_gpus", True, leaf)
    elif key in ("gpus-per-node", "gres"):
        _gpus(reading, text, leaf)
    elif key == "constraint":
        kind = re.search(r"(mi\d{3}x?|h100|h200|a100|b200)", text.lower())
        if kind:
            reading.put("gpu", kind[1], leaf)


def _gpus(reading: Reading, text: str, leaf: Leaf) -> None:
    """8, gpu:8, h200:8, gpu:mi250:8."""
    if text.isdecimal():
        reading.put("gpus_per_node", int(text), leaf)
        return
    for part in text.split(","):
        part = part if part.startswith(("gpu", "gres")) else f"gpu:{part}"
        asked = _GPUS.fullmatch(part)
        if asked:
            reading.put("gpus_per_node", int(asked["count"] or 1), leaf)
            if asked["kind"]:
                reading.put("gpu", asked["kind"].lower(), leaf)


# --- environment and habits -------------------------------------------------------------------------------------


def _environment(reading: Reading, script: Script) -> None:
    for name, token in script.exported.items():
        written = Written(token.text, name, reading.file, token.line)
        if re.search(r"TOKEN|API_KEY|SECRET|PASSWORD", name) and _SECRET.fullmatch(token.text):
            reading.secrets.append(Written("…", name, reading.file, token.line))
            written = Written("…", name, reading.file, token.line)
        reading.env[name] = written
        if name == "NPROC_PER_NODE" and token.text.isdecimal():  # ms-swift and LLaMA-Factory start torchrun by it
            reading.put("launcher_processes", int(token.text), Leaf(name, token.text, token.line))
    for token in script.texts:
        if "pip install" in token.text:
            for match in _PINNED.finditer(token.text):
                name = match[1].lower().replace("_", "-")
                reading.versions[name] = Written(match[2], f"{match[1]}==", reading.file, token.line)
        if rocm := re.search(r"rocm[-_/]?(\d+\.\d+)", token.text):
            reading.versions.setdefault("rocm", Written(rocm[1], "rocm", reading.file, token.line))


def _habits(reading: Reading, script: Script) -> None:
    for token in script.texts:
        leaf = Leaf("trap", token.text, token.line)
        if match := re.match(r"trap\s+.*?\s((?:SIG)?[A-Z0-9]+(?:\s+(?:SIG)?[A-Z0-9]+)*)\s*$", token.text):
            signals = tuple(name.removeprefix("SIG") for name in match[1].split())
            held = reading.values.get("traps", Written(()))
            reading.put("traps", (*held.get(()), *signals), leaf)
        if re.match(r"set\s+-[a-z]*e", token.text) or "errexit" in token.text:
            reading.put("stops_on_error", True, Leaf("set -e", True, token.line))


# --- commands ---------------------------------------------------------------------------------------------------


def _command(reading: Reading, command: list[Token]) -> list[Reading]:
    """Peel the launchers off a command, then read what they start."""
    rest = command
    while rest:
        program = PurePosixPath(rest[0].text).name
        if program == "srun":
            reading.put("launcher_srun", True, Leaf("srun", True, rest[0].line))
            rest = _after_options(rest[1:], reading, _srun_option)
        elif program == "torchrun" or _module(rest, "torch.distributed.run", "torch.distributed.launch"):
            reading.put("launcher", "torchrun", Leaf("torchrun", True, rest[0].line))
            rest = _after_options(rest[1:] if program == "torchrun" else rest[3:], reading, _torchrun_option)
        elif program == "accelerate" and len(rest) > 1 and rest[1].text == "launch":
            reading.put("launcher", "accelerate", Leaf("accelerate launch", True, rest[0].line))
            rest = _after_options(rest[2:], reading, _accelerate_option)
        elif program == "deepspeed":
            reading.put("launcher", "deepspeed", Leaf("deepspeed", True, rest[0].line))
            rest = _after_options(rest[1:], reading, _torchrun_option)
        elif program in _PREFIXES:
            rest = _from_program(rest[1:])
        elif _module(rest, "gatewright.campaign.link"):  # the link of a campaign; behind its folder, what it starts
            rest = _from_program(rest[3:])
        else:
            return _program(reading, program, rest)
    return []


_PREFIXES = frozenset({"singularity", "apptainer", "podman", "docker", "env", "exec", "time", "nohup", "numactl"})
_PREFIXES |= {"then", "do", "else", "!", "{", "if"}
"""Words before a command that start it, or that a shell's grammar puts there."""


def _from_program(rest: list[Token]) -> list[Token]:
    """Words from the first one that names a program we know: what a container runs, behind its options and image."""
    names = (PurePosixPath(token.text).name for token in rest)
    return next((rest[index:] for index, name in enumerate(names) if _PROGRAMS.fullmatch(name)), [])


def _module(rest: list[Token], *modules: str) -> bool:
    program = PurePosixPath(rest[0].text).name
    return bool(_PYTHON.fullmatch(program)) and len(rest) > 2 and rest[1].text == "-m" and rest[2].text in modules


_PROGRAMS = re.compile(r"(python[\d.]*|torchrun|accelerate|deepspeed|axolotl|swift|megatron|trl|gatewright"
    r"|llamafactory-cli"
                       r"|axolotl\.cli\.train|singularity|apptainer|bash|srun|env|.*\.(py|sh))")  # fmt: skip


def _after_options(rest: list[Token], reading: Reading, use: Callable[[Reading, Option], None]) -> list[Token]:
    """Words from the first program on; the options before it are handed to `use`."""
    taken: list[Token] = []
    for index, token in enumerate(rest):
        value_of_option = bool(taken) and taken[-1].text.startswith("-") and "=" not in taken[-1].text
        name = PurePosixPath(token.text).name
        is_program = _PROGRAMS.fullmatch(name) and not (value_of_option and name.endswith(_CONFIGS))
        if not token.text.startswith("-") and is_program:
            for option in options(taken):
                use(reading, option)
            return rest[index:]
        taken.append(token)
    for option in options(taken):
        use(reading, option)
    return []


def _srun_option(reading: Reading, option: Option) -> None:
    if option.key == "cpu-bind" and option.values:
        reading.put("cpu_bind", option.values[0], Leaf("--cpu-bind", True, option.line))


def _torchrun_option(reading: Reading, option: Option) -> None:
    key, text = option.key.replace("-", "_"), option.values[0] if option.values else ""
    leaf = Leaf(f"--{option.key}", text, option.line)
    if key in ("nproc_per_node", "num_gpus") and text.isdecimal():
        reading.put("launcher_processes", int(text), leaf)
    elif key in ("nnodes", "num_nodes") and text.isdecimal():
        reading.put("launcher_nodes", int(text), leaf)
    elif key == "master_port":
        reading.put("launcher_port", text, leaf)
    elif key in ("rdzv_endpoint", "master_addr", "standalone", "hostfile"):
        reading.put("launcher_rendezvous", text or "standalone", leaf)
        if ":" in text:
            reading.put("launcher_port", text.rpartition(":")[2], leaf)
    elif key == "signals_to_handle":
        reading.put("launcher_signals", text, leaf)


def _accelerate_option(reading: Reading, option: Option) -> None:
    text = option.values[0] if option.values else ""
    leaf = Leaf(f"--{option.key}", text, option.line)
    key = option.key.replace("-", "_")
    if key in ("config_file", "deepspeed_config_file") and text:
        reading.names.append(Written(text, f"--{option.key}", reading.file, option.line))
    elif key == "num_processes" and text.isdecimal():
        reading.put("ranks", int(text), leaf)
    elif key == "num_machines" and text.isdecimal():
        reading.put("launcher_nodes", int(text), leaf)
    elif key == "main_process_port":
        reading.put("launcher_port", text, leaf)
    elif key == "main_process_ip":
        reading.put("launcher_rendezvous", text, leaf)
    elif key == "zero_stage" and text.isdecimal():
        reading.put("zero", int(text), leaf)
    elif key == "use_fsdp":
        reading.put("fsdp", True, leaf)
    elif key == "use_deepspeed":
        reading.put("backend", "deepspeed", leaf)
    elif key == "mixed_precision" and text in ("bf16", "fp16"):
        reading.put(text, True, leaf)


def _program(reading: Reading, program: str, rest: list[Token]) -> list[Reading]:
    """The training or export command that starts here, if it is one we know."""
    if _PYTHON.fullmatch(program):
        if _module(rest, "axolotl.cli.train"):
            return _configs(reading, rest[3:])
        if _module(rest, "gatewright"):
            return _configs(reading, rest[4:])
        if len(rest) > 2 and rest[1].text == "-m":
            return []
        scripts = [index for index, token in enumerate(rest) if token.text.endswith(".py")]
        return _program(reading, PurePosixPath(rest[scripts[0]].text).name, rest[scripts[0] :]) if scripts else []
    verb = rest[1].text if len(rest) > 1 else ""
    leaves, file = _leaves(rest[1:]), reading.file
    if program == "axolotl.cli.train":
        return _configs(reading, rest[1:])
    if program in ("bash", "sh"):
        return _configs(reading, rest[1:2], endings=(".sh", ".bash"))
    if program in ("axolotl", "gatewright"):
        return _configs(reading, rest[2:])
    if program in ("llamafactory-cli", "lmf"):
        return _configs(reading, rest[2:]) or ([read_llamafactory(leaves, file=file)] if leaves else [])
    if program == "swift":
        _configs(reading, rest[2:3])
        return [read_swift(leaves, file=file, verb=verb)] if leaves else []
    if program == "megatron":
        return [read_swift_megatron(leaves, file=file, verb=verb)] if leaves else []
    if program == "trl":
        _options_that_name_files(reading, rest)
        return [read_trl(leaves, file=file, task=verb)] if leaves else []
    return _tool_or_script(reading, program, rest, leaves)


def _tool_or_script(reading: Reading, program: str, rest: list[Token], leaves: list[Leaf]) -> list[Reading]:
    line, file = rest[0].line, reading.file
    if program == "llama-quantize":
        reading.put("export_quant", rest[-1].text, Leaf(program, True, line))
        return []
    if program in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        kind = "gguf-adapter" if "lora" in program else "gguf"
        reading.put("export", kind, Leaf(program, True, line))
        reading.put("export_options", tuple(token.text for token in rest[1:]), Leaf(program, True, line))
        return []
    if not program.endswith(".py") or not leaves:
        return []
    keys = {leaf.key for leaf in leaves}
    if keys & {"tensor_model_parallel_size", "micro_batch_size", "num_layers", "seq_length"}:
        return [read_megatron(leaves, file=file)]
    if "finetuning_type" in keys or "cutoff_len" in keys:
        return [read_llamafactory(leaves, file=file)]
    task = {"sft.py": "sft", "dpo.py": "dpo", "kto.py": "kto", "gkd.py": "gkd", "grpo.py": "grpo"}.get(program, "")
    if task or keys & {"use_peft", "lora_r", "dataset_text_field", "max_seq_length"}:
        return [read_trl(leaves, file=file, task=task)]
    if keys & {"model_name_or_path", "output_dir", "per_device_train_batch_size"}:
        return [read_trainer(leaves, file=file)]
    return []


def _configs(reading: Reading, rest: list[Token], *, endings: tuple[str, ...] = _CONFIGS) -> list[Reading]:
    """Configs named by position."""
    for token in rest:
        if token.text.endswith(endings):
            reading.names.append(Written(token.text, "command", reading.file, token.line))
    return []


def _options_that_name_files(reading: Reading, rest: list[Token]) -> None:
    for option in options(rest):
        if option.key in ("config", "accelerate_config", "config_file") and option.values:
            reading.names.append(Written(option.values[0], f"--{option.key}", reading.file, option.line))


def _leaves(rest: list[Token]) -> list[Leaf]:
    """Options as leaves: `--key a b` is a list, `--key` alone is true, `--no-key` stays as it is."""
    found: list[Leaf] = []
    for option in options(rest):
        key = option.key.replace("-", "_")
        values = [plain_value(value) for value in option.values]
        value: object = True if not values else values[0] if len(values) == 1 else [str(item) for item in values]
        found.append(Leaf(key, value, option.line))
    return found
