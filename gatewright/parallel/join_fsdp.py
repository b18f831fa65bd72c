"""Parameters that come after `fully_shard`: they join the group of their module, so that one gather brings them all.

`fully_shard` divides what a module holds when it is called, which is on meta, before weights are read. Adapters are put
in place afterwards, and torch has no public way to add to a group. What is used of its inside stands here alone, and a
torch whose inside is another is refused.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from gatewright.spec.errors import ModelError

Place = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


def join_fsdp(module: FSDPModule, places: Sequence[Place], *, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Divides plain parameters of a module, or of its submodules, with those that FSDP divides there already.

    A rank keeps its rows of each, and gets the rest together with the module's other parameters. `mesh` and `policy`
    are those that the module was divided with. Raises ModelError where torch's inside is not what is known here.
    """
    try:
        _join(module, places, mesh=mesh, policy=policy)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{_refusal()}: {type(error).__name__}: {error}") from error
    if not all(isinstance(owner._parameters[name], DTensor) for owner, name in places):
        raise ModelError(f"{_refusal()}: a parameter was left whole")


def follow_parametrized(module: FSDPModule) -> None:
    """Tells FSDP of those of its parameters that a parametrization has moved since."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for known in group.fsdp_params:
            info = known._module_info
            if info.param_name not in info.module._parameters:
                assert parametrize.is_parametrized(info.module, info.param_name)
                info.module, info.param_name = info.module.parametrizations[info.param_name], "original"


def _join(module: FSDPModule, places: Sequence[Place], *, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    state = module._get_fsdp_state()
    if state._fsdp_param_groups:
        [group] = state._fsdp_param_groups
        settings = (group.mesh_info, group.post_forward_mesh_info, group.device, None, group.mp_policy)
        for owner, name in places:
            info = ParamModuleInfo(owner, name)
            group.fsdp_params.append(FSDPParam(owner._parameters[name], info, *settings, group.offload_policy))
    else:
        info = _get_mesh_info(mesh)
        added = [owner._parameters[name] for owner, name in places]
        group = FSDPParamGroup(added, state._modules, info, info, state._device, None, policy, OffloadPolicy())
        state._fsdp_param_groups.append(group)
    if state._is_root is not None:  # a forward pass has made FSDP's first-time preparations
        group.comm_ctx = state._comm_ctx
        group.lazy_init()


def _refusal() -> str:
    return (
        f"parallel.dense: zero3: torch {torch.__version__} keeps what FSDP divides in another way than 2.13, so that "
        "adapters cannot join it; use dense: zero2, or torch 2.13"
    )
