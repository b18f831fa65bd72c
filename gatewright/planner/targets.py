"""From targets in words to what trains: roles, patterns over module names, a share of the experts, roles in full."""

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gatewright.planner.job import Adapter
from gatewright.spec.errors import UserError
from gatewright.spec.shape import TARGET_ROLES, TRAINED_ROLES, ModelShape, TensorRole

WILD = frozenset("*?[")
MODULES: dict[TensorRole, str] = {
    "attention": "self_attn",
    "linear_attention": "linear_attn",
    "dense_mlp": "mlp",
    "router": "mlp",
    "routed_experts": "mlp.experts",
    "shared_experts": "mlp.shared_expert",
}
"""Where transformers 5.24 puts the modules of a role in a block, in most families."""
Module = tuple[TensorRole, str]


def adapter_of(
    shape: ModelShape,
    *,
    rank: int,
    targets: Sequence[str],
    names: Iterable[str] | None = None,
    full: Sequence[str] = (),
    expert_share: float = 1.0,
    expert_numbers: Sequence[Sequence[int]] = (),
    dropout: bool = False,
) -> Adapter:
    """The adapter that the words describe.

    `targets`: names of TARGET_ROLES, or patterns over module names. `names` keeps only some leaf names of them. `full`:
    names of TRAINED_ROLES whose weights train beside the adapter. `expert_share`: the part of the experts that gets
    one; `expert_numbers`: which those are, layer by layer, where that is known. Raises UserError for what the model
    does not have.
    """
    roles = roles_of(shape, [target for target in targets if not WILD.intersection(target)])
    shares = matched(shape, [target for target in targets if WILD.intersection(target)])
    if "routed_experts" in roles and expert_share < 1:
        experts: tuple[TensorRole, ...] = TARGET_ROLES["experts"]
        shares |= {(group.role, linear.name): expert_share for group, linear in shape.linears(experts)}
    partly = frozenset(role for role, _ in shares) - roles
    whole = trained_roles(shape, full)
    if twice := whole & (roles | partly):
        raise UserError(
            f"{', '.join(sorted(twice))}: named both for an adapter and to train in full; leave one of the two out."
        )
    return Adapter(
        rank=rank,
        roles=roles | partly,
        names=modules_of(shape, roles | partly, names),
        partly=partly,
        shares=shares,
        full=whole,
        chosen=tuple(map(tuple, expert_numbers)),
        dropout=dropout,
    )


def roles_of(shape: ModelShape, targets: Sequence[str]) -> frozenset[TensorRole]:
    """Tensor roles behind the targets. Raises UserError for an unknown one, or one this model does not have."""
    return _behind(shape, targets, TARGET_ROLES, what="target", verb="adapt")


def trained_roles(shape: ModelShape, roles: Sequence[str]) -> frozenset[TensorRole]:
    """Tensor roles behind the words for weights that train in full. Raises UserError as roles_of does."""
    return _behind(shape, roles, TRAINED_ROLES, what="role", verb="train")


def _behind(
    shape: ModelShape, words: Sequence[str], table: Mapping[str, tuple[TensorRole, ...]], *, what: str, verb: str
) -> frozenset[TensorRole]:
    roles: set[TensorRole] = set()
    present = set(shape.parameters_by_role())
    for word in words:
        if word not in table:
            raise UserError(f"No {what} is called {word[:40]!r}.{_nearest(word, table)} Known: {', '.join(table)}.")
        found = present.intersection(table[word])
        if not found:
            has = ", ".join(name for name, behind in table.items() if present.intersection(behind))
            tied = ": its head is its embedding" if word == "head" and shape.tied else ""
            raise UserError(f"{shape.name} has no {word} to {verb}{tied}; it has: {has}.")
        roles.update(found)
    return frozenset(roles)


def modules_of(shape: ModelShape, roles: frozenset[TensorRole], modules: Iterable[str] | None) -> frozenset[str] | None:
    """Leaf names kept of the roles' modules. Raises UserError for a name that none of them has."""
    if modules is None:
        return None
    known = dict.fromkeys(linear.name for _, linear in shape.linears(roles) if linear.module)
    for name in modules:
        if name not in known:
            raise UserError(
                f"{shape.name} has no module {name[:40]!r} among its targets.{_nearest(name, known)} "
                f"Has: {', '.join(known)}."
            )
    return frozenset(modules)


def matched(shape: ModelShape, patterns: Sequence[str]) -> dict[Module, float]:
    """Of the modules of each kind, the part that a pattern matches. Raises UserError for one that matches nothing."""
    paths = list(module_paths(shape))
    every = Counter(module for module, _ in paths)
    found: set[tuple[Module, str]] = set()
    for pattern in patterns:
        own = {(module, path) for module, path in paths if fnmatch.fnmatchcase(path, pattern)}
        if not own:
            raise UserError(
                f"targets {pattern[:60]!r} matches no module that the planner knows of {shape.name}, such as "
                f"{paths[0][1]}. Name roles ({', '.join(TARGET_ROLES)}), or add --simulate, which sees its own names."
            )
        found |= own
    counts = Counter(module for module, _ in found)
    return {module: count / every[module] for module, count in counts.items()}


def module_paths(shape: ModelShape) -> Iterator[tuple[Module, str]]:
    """Kind and full name of every module that can take an adapter."""
    for group in shape.groups:
        if group.role in ("mtp", "vision"):
            continue
        if group.role == "embedding":
            yield ("embedding", "embed_tokens"), "model.embed_tokens"
        for linear in group.linears:
            inside = f"model.layers.{group.layer}.{MODULES.get(group.role, 'mlp')}." if group.layer is not None else ""
            yield (group.role, linear.name), f"{inside}{linear.name}"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" Nearest: {near[0]}." if near else ""
