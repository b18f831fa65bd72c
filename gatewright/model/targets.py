"""What the targets in a run file are in one model: weights that take an adapter, found by role or by pattern."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from gatewright.model.experts import find_experts, lora_shapes
from gatewright.model.roles import head_is_tied, layer_of, parameter_roles
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError

ADAPTABLE = tuple(role for role in get_args(spec.Role))
_FUSED = ("gate_proj", "up_proj", "w1", "w2", "w3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A weight that takes a low-rank update."""

    path: str
    """The module that holds it."""
    weight: str
    """Its name there."""
    role: str
    layer: int | None
    kind: Literal["linear", "embedding", "experts", "matrix"]
    """matrix: a bare weight of a module that is no plain linear layer, such as a router."""

    @property
    def name(self) -> str:
        return f"{self.path}.{self.weight}"


def choose_targets(model: PreTrainedModel, adapter: spec.Adapter) -> tuple[list[Target], list[str]]:
    """The weights that `adapter.targets` names, in the model's order, and what the user should know of them.

    Raises ModelError for a target that matches nothing or less than it says, and for tied weights.
    """
    candidates = list(adaptable(model))
    roles = parameter_roles(model)
    chosen: set[str] = set()
    notes: list[str] = []
    for target in adapter.targets:
        if target in ADAPTABLE:
            found = [c for c in candidates if c.role == target]
            _refuse_gaps(target, found, roles, tied=head_is_tied(model))
            notes += _left_out(target, found, model, roles)
        else:
            found = [c for c in candidates if fnmatchcase(c.path, target) or fnmatchcase(c.name, target)]
            _refuse_hidden_experts(target, found, candidates, adapter.targets)
            notes += _reach(target, found, candidates)
        chosen |= {c.name for c in found}
    targets = [c for c in candidates if c.name in chosen]
    _refuse_conflicts(model, adapter, targets)
    if "experts" in roles.values() and not any(t.role == "experts" for t in targets):
        share = _share(model, roles, "experts")
        notes.append(f"method.adapter.targets: no expert gets an adapter; experts are {share:.0%} of the weights")
    return targets, notes


def adaptable(model: PreTrainedModel) -> Iterator[Target]:
    """Every weight that can take a low-rank update: those of linear layers, experts, the embedding, bare matrices."""
    roles = parameter_roles(model)
    experts = {id(module) for module in find_experts(model).values()}
    embedding = model.get_input_embeddings()
    for path, module in model.named_modules():
        if id(module) in experts:
            for weight in lora_shapes(module):
                yield Target(path=path, weight=weight, role="experts", layer=layer_of(path), kind="experts")
            continue
        parameter = module._parameters.get("weight")
        if parameter is None or parameter.dim() != 2:
            continue
        kind: Literal["linear", "embedding", "matrix"] = "matrix"
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            kind = "linear"
        elif module is embedding:
            kind = "embedding"
        # A tied weight is listed once, under the name of the embedding.
        if role := roles.get(f"{path}.weight"):
            yield Target(path=path, weight="weight", role=role, layer=layer_of(path), kind=kind)


def _refuse_gaps(role: str, found: list[Target], roles: dict[str, str], *, tied: bool) -> None:
    if not found:
        have = [r for r in ADAPTABLE if r in roles.values()]
        why = " (its head is the embedding's weight)" if role == "head" and tied else ""
        raise ModelError(
            f"method.adapter.targets: {role!r} matches no weight of this model{why}, which has {', '.join(have)}; "
            "remove it from the list"
        )
    layers = {layer_of(name) for name, r in roles.items() if r == role and name.endswith(".weight")}
    missing = sorted(layer for layer in layers - {t.layer for t in found} if layer is not None)
    if missing:
        names = [name for name, r in roles.items() if r == role and layer_of(name) == missing[0]]
        raise ModelError(
            f"method.adapter.targets: {role!r} can be adapted in {len(layers) - len(missing)} of {len(layers)} layers: "
            f"layer {missing[0]} has it as {names[0]}, which takes no adapter; name what you want by patterns instead"
        )


def _left_out(role: str, found: list[Target], model: PreTrainedModel, roles: dict[str, str]) -> list[str]:
    names = {t.name for t in found}
    left = [n for n, p in model.named_parameters() if roles[n] == role and p.dim() >= 2 and n not in names]
    left = [name for name in left if not name.endswith("bias")]
    if not left:
        return []
    return [f"method.adapter.targets: {role}: {len(left)} weights take no adapter and stay frozen, such as {left[0]}"]


def _reach(pattern: str, found: list[Target], candidates: list[Target]) -> list[str]:
    """Says so where a pattern reaches some layers only of those that have the role."""
    notes = []
    for role in dict.fromkeys(t.role for t in found):
        have = {c.layer for c in candidates if c.role == role}
        reached = {t.layer for t in found if t.role == role}
        if reached != have:
            notes.append(
                f"method.adapter.targets: {pattern!r} reaches {len(reached)} of the {len(have)} layers with {role}"
            )
    return notes


def _refuse_hidden_experts(pattern: str, found: list[Target], candidates: list[Target], targets: Iterable[str]) -> None:
    """Refuses a pattern for the experts' projections by names that they lose when they are fused into one weight."""
    fused = {c.path: [d.weight for d in candidates if d.path == c.path] for c in candidates if c.kind == "experts"}
    if "experts" not in targets:
        for path, weights in fused.items():
            if any(t.path == path for t in found):
                continue
            block = path.rpartition(".")[0]
            names = [f"{prefix}.{leaf}" for prefix in (block, f"{path}.0") for leaf in _FUSED]
            if any(fnmatchcase(name, pattern) for name in names):
                raise ModelError(
                    f"method.adapter.targets: {pattern!r} would leave out the experts of layer {layer_of(path)} and "
                    f"others, whose projections are fused as {' and '.join(weights)} in {path}; write experts, or a "
                    "pattern that names layers outside the experts only"
                )
    if not found:
        raise ModelError(
            f"method.adapter.targets: {pattern!r} matches no module that can take an adapter; names look like "
            f"{candidates[0].path} and {candidates[-1].path}"
        )


def _refuse_conflicts(model: PreTrainedModel, adapter: spec.Adapter, targets: list[Target]) -> None:
    touched = {t.role for t in targets} | set(adapter.full)
    if head_is_tied(model) and touched & {"embedding", "head"}:
        raise ModelError(
            "method.adapter: embedding and head are one tied weight in this model; an adapter or a trained copy of one "
            "would leave the other behind. Take embedding and head out of targets and full"
        )
    if both := {t.role for t in targets} & set(adapter.full):
        raise ModelError(
            f"method.adapter: {', '.join(sorted(both))} stands in targets and in full; a weight that trains in full "
            "needs no adapter: keep one of them"
        )
    if adapter.experts and not any(t.kind == "experts" for t in targets):
        raise ModelError("method.adapter.experts: no target is an expert; add experts to targets, or remove it")


def _share(model: PreTrainedModel, roles: dict[str, str], role: str) -> float:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(n for name, n in sizes.items() if roles[name] == role) / sum(sizes.values())
