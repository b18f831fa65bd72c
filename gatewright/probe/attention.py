"""Attention kernels, run forward and backward on packed documents and held against the computation in float32.

Shapes: T tokens, N query heads, K key heads, D width of queries and keys, V width of values.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gatewright.model.attention import Kernel, attend_each_document, attend_plain, choose_kernel, torch_varlen
from gatewright.probe.children import Wanted
from gatewright.spec.errors import ModelError
from gatewright.spec.probe import AttentionKernel

DTYPE = torch.bfloat16
LENGTHS = {"cpu": (200, 17, 167), "cuda": (1500, 33, 515)}
"""Tokens of the packed documents; the last one ends inside a kernel's block."""
MOST_KEY_HEADS = 2
MOST_GROUP = 8
"""Fewer heads than the model has: a kernel is chosen by widths and by queries a key, not by how many there are."""


@dataclass(frozen=True, slots=True)
class Heads:
    query: int = 8
    key: int = 2
    qk_dim: int = 128
    v_dim: int = 128


def measure_attention(wanted: Wanted) -> tuple[str, list[dict[str, object]]]:
    heads = heads_of(Path(wanted.model)) if wanted.model else Heads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = LENGTHS[device.type]
    q, k, v, grad = inputs(heads, tokens=sum(lengths), device=device)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    exact = gradients(attend_plain, q.float(), k.float(), v.float(), grad.float(), bounds, max(lengths))
    plain = gradients(attend_plain, q, k, v, grad, bounds, max(lengths))
    plain_error = max(errors(plain, exact))
    found = []
    for kernel, chosen in kernels(device):
        output, gradient, problem = judge(kernel, (q, k, v, grad), bounds, max(lengths), exact)
        found.append(
            AttentionKernel(
                kernel=kernel.name,
                chosen=chosen,
                device=device.type,
                query_heads=heads.query,
                key_heads=heads.key,
                qk_dim=heads.qk_dim,
                v_dim=heads.v_dim,
                tokens=sum(lengths),
                output_error=output,
                gradient_error=gradient,
                plain_error=plain_error,
                problem=problem,
            )
        )
    return in_words(found, heads), [asdict(item) for item in found]


def heads_of(folder: Path) -> Heads:
    """Sizes of one attention layer of a model, from its config.json. Raises ModelError where they are not there."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    try:
        text: Mapping[str, Any] = values.get("text_config") or values
        query = int(text["num_attention_heads"])
        key = int(text.get("num_key_value_heads") or query)
        if text.get("kv_lora_rank"):
            qk_dim = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
            key, v_dim = query, int(text["v_head_dim"])
        else:
            qk_dim = v_dim = int(text.get("head_dim") or text["hidden_size"] // query)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ModelError(f"{path} does not say the sizes of its attention heads") from None
    keys = min(key, MOST_KEY_HEADS)
    return Heads(query=keys * min(max(1, query // key), MOST_GROUP), key=keys, qk_dim=qk_dim, v_dim=v_dim)


def inputs(heads: Heads, *, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [1, N, T, D], k [1, K, T, D], v [1, K, T, V], gradient of the output [1, T, N, V]; normal, seeded."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, heads.query, tokens, heads.qk_dim),
        (1, heads.key, tokens, heads.qk_dim),
        (1, heads.key, tokens, heads.v_dim),
        (1, tokens, heads.query, heads.v_dim),
    )
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, DTYPE) for shape in shapes)
    return q, k, v, grad


def kernels(device: torch.device) -> Iterator[tuple[Kernel, bool]]:
    """The trainer's choice first, then what else is in reach; each forced, so that no fallback answers for it."""
    chosen = choose_kernel(device, DTYPE)
    yield chosen, True
    if device.type != "cuda":
        return
    if "varlen_attn" not in chosen.name:
        yield torch_varlen(""), False
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        yield Kernel(f"sdpa {backend.name.lower()}", "", forced(backend)), False


def forced(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(*arguments: Any) -> Tensor:
        with sdpa_kernel(backend):
            return attend_each_document(*arguments)

    return attend


def judge(
    kernel: Kernel, tensors: tuple[Tensor, ...], bounds: Tensor, longest: int, exact: list[Tensor]
) -> tuple[float | None, float | None, str]:
    """(error of the output, worst error of the gradients, what is wrong)."""
    q, k, v, grad = tensors
    width, pad = v.shape[-1], q.shape[-1] - v.shape[-1] if kernel.equal_widths else 0

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return kernel.attend(q, k, F.pad(v, (0, pad)), *rest)[..., :width]

    try:
        made = gradients(attend, q, k, v, grad, bounds, longest)
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as raised:
        return None, None, (str(raised).strip().splitlines() or [type(raised).__name__])[0]
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    bad = [name for name, tensor in zip(names, made, strict=True) if not tensor.isfinite().all()]
    if bad:
        return None, None, f"NaN or infinite: {', '.join(bad)}"
    output, *rest = errors(made, exact)
    return output, max(rest), ""


def gradients(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bounds: Tensor, longest: int
) -> list[Tensor]:
    """Output, and gradients of q, k and v, in float32."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    if attend is attend_plain:
        out = attend_plain(q, k, v, bounds, q.shape[-1] ** -0.5)
    else:
        out = attend(q, k, v, bounds, longest, q.shape[-1] ** -0.5, None)
    return [x.detach().float() for x in (out, *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype)))]


def errors(made: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Largest difference of each tensor over its largest entry."""
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(made, exact, strict=True)]


def in_words(found: list[AttentionKernel], heads: Heads) -> str:
    words = []
    for item in found:
        if item.problem:
            words.append(f"{item.kernel} fails: {item.problem[:60]}")
        else:
            words.append(f"{item.kernel} off by {item.output_error:.1e}, gradients {item.gradient_error:.1e}")
    sizes = str(heads.qk_dim) if heads.qk_dim == heads.v_dim else f"{heads.qk_dim}/{heads.v_dim}"
    return f"head size {sizes}: {'; '.join(words)} (written out in bf16: {found[0].plain_error:.1e})"
