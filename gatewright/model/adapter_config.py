"""What PEFT must be told of an adapter to build it again: which modules, and which parameters, by name."""

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from gatewright.model.adapters import MatrixLora, full_modules
from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.experts import find_experts
from gatewright.model.roles import is_attention
from gatewright.spec import run as spec


def peft_config(model: PreTrainedModel, adapter: spec.Adapter) -> LoraConfig:
    """What stock PEFT needs to rebuild these adapters.

    In a MoE model, linear layers outside attention are named as parameters (`mlp.gate_proj.weight`): named as modules,
    PEFT 0.21 would take their `gate_proj` for that of the fused experts. Dropout works in training alone, and PEFT
    refuses it for adapted parameters, so where there are any, its config has none.
    """
    names = {_bare_module(name) for name, _ in model.named_modules()}
    names = {name for name in names if ".lora_" not in name and f".{LORA}" not in name}
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    as_parameters = {name for name in adapted if find_experts(model) and not is_attention(name)}
    as_parameters -= {name for name in adapted if isinstance(model.get_submodule(name).base_layer, nn.Embedding)}
    wanted = {f"{name}.weight" for name in as_parameters}
    everything = {f"{name}.weight" for name in names}
    for name, module in model.named_modules():
        if isinstance(module, MatrixLora):
            wanted.add(f"{_bare_module(name)}.weight")
        elif isinstance(module, ExpertLora):
            wanted |= {f"{name.removesuffix(f'.{LORA}')}.{weight}" for weight in module.A}
    for experts in find_experts(model).values():
        path = next(name for name, module in model.named_modules() if module is experts)
        everything |= {f"{path}.{weight}" for weight, _ in experts.named_parameters(recurse=False)}
    parameters = _suffixes(wanted, among=everything)
    full = set(full_modules(model, adapter))
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha_value,
        lora_dropout=0.0 if parameters else adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=sorted(_suffixes(adapted - as_parameters, among=names)),
        target_parameters=sorted(parameters) or None,
        modules_to_save=sorted(_suffixes(full, among=names, whole_parts=False)) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _bare_module(name: str) -> str:
    return name.partition(".parametrizations")[0].replace(".base_layer", "")


def _suffixes(wanted: set[str], *, among: set[str], whole_parts: bool = True) -> set[str]:
    """The shortest name endings that match every wanted name and, of all names in `among`, no other.

    Endings are cut at dots. PEFT matches `modules_to_save` by the bare end of a name: `whole_parts` False.
    """
    found = set()
    for name in wanted:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ending = ".".join(parts[-count:])
            tail = f".{ending}" if whole_parts else ending
            if all(other in wanted for other in among if other == ending or other.endswith(tail)):
                found.add(ending)
                break
        else:
            found.add(name)
    return found
