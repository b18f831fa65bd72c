"""GW00x: the files themselves, judged where they are read."""

from gatewright.preflight.fault import Fault, Rule
from gatewright.preflight.job import Job


def unreadable_file(job: Job) -> Fault | None:
    """A file that is missing, binary, too large or neither YAML, JSON nor a script cannot be judged."""


def key_written_twice(job: Job) -> Fault | None:
    """YAML readers keep the last of two equal keys, without a word."""


def named_file_is_missing(job: Job) -> Fault | None:
    """A config that another file names was not found, so it was not judged."""


def run_file_mistake(job: Job) -> Fault | None:
    """Our own run file is read strictly: what it says wrong stops the run before it starts."""


def misspelt_key(job: Job) -> Fault | None:
    """A key that a tool does not know is an error to some tools and ignored by others: the setting that was meant keeps
    its default."""


UNREADABLE = Rule("GW001", "error", unreadable_file, "-")
TWICE = Rule("GW002", "warning", key_written_twice, "YAML 1.2 §3.2.1.3; PyYAML keeps the last")
MISSING = Rule("GW003", "note", named_file_is_missing, "-")
MISTAKE = Rule("GW004", "error", run_file_mistake, "the JSON Schema of `gatewright schema`")
MISSPELT = Rule("GW005", "warning", misspelt_key, "argument lists of axolotl 0.19, LLaMA-Factory 0.9.5, ms-swift 4.6, "
                "TRL 1.16, transformers 5.24, DeepSpeed 0.19, accelerate 1.15, Megatron Core 0.16")  # fmt: skip
RULES = (UNREADABLE, TWICE, MISSING, MISTAKE, MISSPELT)
