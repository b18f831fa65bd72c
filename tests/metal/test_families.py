"""Every family trains on packed documents with adapters as transformers' eager model does on each document alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.experts import find_experts
from gatewright.model.head import head_of
from gatewright.model.load import load_model
from gatewright.model.recompute import recompute
from gatewright.parallel.apply import spread_gradients
from gatewright.parallel.ranks import alone
from gatewright.spec.run import Adapter, Model, Train
from gatewright.train.forward import decoder, hidden_states
from gatewright.train.optim import build_optimizer, trainable
from gatewright.train.prove import prove_head, prove_isolation
from gatewright.train.step import StepResult, train_step

CPU = torch.device("cpu")
ADAPTER = Adapter(rank=3, alpha=6.0)
PACKS = ((5, 1, 19, 9), (7, 4))
"""Document lengths of two micro-batches: one token, one longer than every window, chunk and top-k."""


def document(length: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=draw)


def pack(documents: list[Tensor]) -> Batch:
    lengths = tuple(len(d) for d in documents)
    labels = [torch.cat([d[1:], torch.tensor([-100])]) for d in documents]
    return Batch(
        tokens_T=torch.cat(documents),
        labels_T=torch.cat(labels),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_S1=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=lengths,
        documents=tuple(range(len(lengths))),
    )


DOCUMENTS = [[document(n, 10 * i + j) for j, n in enumerate(lengths)] for i, lengths in enumerate(PACKS)]


def load_ours(name: str, folder: Path, *, checkpointing: str = "none") -> PreTrainedModel:
    """The family's model behind our seams, with adapters whose every factor is random."""
    model = load_model(Model(path=str(folder), dtype="float32"), device=CPU, kernel=choose_kernel(CPU, torch.float32))
    adapter = ADAPTER.model_copy(update={"targets": list(FAMILIES[name].targets)})
    add_adapters(model, adapter, seed=0)
    torch.manual_seed(7)
    for parameter in trainable(model).values():
        parameter.data.normal_(std=0.1)
    recompute(model, checkpointing)
    return model.eval()


def step(model: PreTrainedModel) -> tuple[StepResult, dict[str, Tensor]]:
    """One step over both packs: its result, and the gradient of each adapter's factor."""
    parameters = trainable(model)
    gradients = spread_gradients(model, parameters, alone(CPU))
    optimizer = build_optimizer(gradients.owned, Train(tokens_per_step=64, steps=1, lr=1e-2))
    batches = [pack(documents) for documents in DOCUMENTS]
    result = train_step(
        model, head_of(model), optimizer, gradients, batches, lr=1e-2, clip_norm=None, loss_chunk_tokens=16
    )
    return result, {name: p.grad for name, p in parameters.items() if p.grad is not None}


@dataclass(frozen=True)
class Factors:
    """One adapter: the weight it changes in transformers' own model, its parameters' names, and its factors."""

    weight: str
    a_name: str
    b_name: str
    a: Tensor
    b: Tensor
    transposed: bool

    def delta(self, scale: float) -> Tensor:
        product = scale * self.b @ self.a
        return product.transpose(-2, -1) if self.transposed else product

    def gradients(self, of_weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Gradients of (A, B) from that of the weight, by the chain rule."""
        of_weight = of_weight.transpose(-2, -1) if self.transposed else of_weight
        return scale * self.b.transpose(-2, -1) @ of_weight, scale * of_weight @ self.a.transpose(-2, -1)


def factors(model: PreTrainedModel) -> Iterator[Factors]:
    parameters = trainable(model)
    for name, a in parameters.items():
        b_name = name.replace("lora_A", "lora_B").replace("lora.A.", "lora.B.")
        if name.endswith(".lora_A.default.weight"):
            yield Factors(name.replace(".lora_A.default", ""), name, b_name, a, parameters[b_name], False)
        elif name.endswith(".parametrizations.weight.0.A"):
            b_name = f"{name[:-1]}B"
            yield Factors(
                name.replace(".parametrizations.weight.0.A", ".weight"), name, b_name, a, parameters[b_name], False
            )
        elif ".gatewright_lora.A." in name:
            path, _, weight = name.partition(".gatewright_lora.A.")
            transposed = bool(model.get_submodule(path).is_transposed)
            yield Factors(f"{path}.{weight}", name, b_name, a, parameters[b_name], transposed)


def load_oracle(folder: Path, ours: PreTrainedModel) -> PreTrainedModel:
    """transformers' eager model of the same files with every adapter added into its weight, which takes gradients."""
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if any("experts" in name for name, _ in oracle.named_modules()) and "Llama4" not in type(oracle).__name__:
        oracle.set_experts_implementation("eager")
    oracle.requires_grad_(False)
    weights = dict(oracle.named_parameters())
    for f in factors(ours):
        weights[f.weight].data += f.delta(ADAPTER.scale).detach()
        weights[f.weight].requires_grad_()
    return oracle.eval()


def count_choices(oracle: PreTrainedModel) -> dict[str, Tensor]:
    """Path of each mixture of experts -> how often its router chose each expert, filled by the forwards to come."""
    counts: dict[str, Tensor] = {}

    def add(path: str, chosen_E: Tensor) -> None:
        counts[path] = counts.get(path, 0) + chosen_E

    for name, module in oracle.named_modules():
        if type(module).__name__ == "Llama4Router":
            module.register_forward_hook(lambda m, i, out, name=name: add(name, (out[0] > 0).sum(0)))
        elif isinstance(module._parameters.get("down_proj"), nn.Parameter) and "Llama4" not in type(module).__name__:
            module.register_forward_pre_hook(
                lambda m, i, name=name: add(name, torch.bincount(i[1].flatten(), minlength=m.down_proj.shape[0]))
            )
    return counts


def assert_near(got: Tensor, wanted: Tensor, what: str, *, relative: float) -> None:
    """The largest difference over the largest value."""
    difference = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)
    assert difference <= relative, f"{what}: relative difference {difference:.2g}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_family(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_step_is_that_of_each_document_alone(name: str, folders: dict[str, Path]) -> None:
    """Loss, gradient of every adapter and routing counts, with and without recomputing the activations."""
    ours = load_ours(name, folders[name])
    oracle = load_oracle(folders[name], ours)
    choices = count_choices(oracle)
    wanted_loss, targets = torch.zeros(()), sum(len(d) - 1 for pack_ in DOCUMENTS for d in pack_)
    for d in (d for pack_ in DOCUMENTS for d in pack_):
        logits_TV = oracle(input_ids=d[None], use_cache=False).logits[0]
        wanted_loss = wanted_loss + nn.functional.cross_entropy(logits_TV[:-1], d[1:], reduction="sum") / targets
    wanted_loss.backward()

    before = {f.a_name: f for f in factors(ours)}
    weights = dict(oracle.named_parameters())
    wanted: dict[str, Tensor] = {}
    for f in before.values():
        grad = weights[f.weight].grad
        assert grad is not None, f"{f.weight} has an adapter but no gradient reaches it"
        wanted[f.a_name], wanted[f.b_name] = (g.detach().clone() for g in f.gradients(grad, ADAPTER.scale))

    result, grads = step(ours)
    assert result.loss == pytest.approx(wanted_loss.item(), rel=1e-5)
    assert set(grads) == set(wanted)
    for key, grad in grads.items():
        assert_near(grad, wanted[key], key, relative=1e-4)
    if choices:
        assert result.expert_tokens is not None
        assert torch.equal(result.expert_tokens, torch.stack(list(choices.values())))
    else:
        assert result.expert_tokens is None

    again, regrads = step(load_ours(name, folders[name], checkpointing="full"))
    assert again.loss == result.loss
    for key, grad in regrads.items():
        assert_near(grad, grads[key], f"recomputed {key}", relative=1e-6)
    if choices:
        assert torch.equal(again.expert_tokens, result.expert_tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_document_moves_another_nor_takes_gradient_from_it(name: str, folders: dict[str, Path]) -> None:
    model = load_ours(name, folders[name])
    prove_isolation(model, device=CPU)
    prove_head(model, head_of(model), device=CPU)

    batch = pack(DOCUMENTS[0])
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
    )
    hidden_TH = hidden_states(model, batch)
    hook.remove()
    start, end = batch.cu_seqlens_S1[2:4].tolist()
    torch.manual_seed(1)
    (hidden_TH[start:end] * torch.randn(end - start, hidden_TH.shape[1])).sum().backward()
    of_tokens_T = embedded[0].grad[0].abs().sum(dim=1)
    assert (of_tokens_T[start : end - 1] > 0).all()
    assert not of_tokens_T[:start].any()
    assert not of_tokens_T[end:].any()


def test_transformers_own_model_is_packed_wrongly_where_it_matters(folders: dict[str, Path]) -> None:
    """That the oracle tells a boundary from none: linear attention run straight over the row gives other numbers."""
    model = load_ours("qwen3_next", folders["qwen3_next"])
    batch = pack(DOCUMENTS[0])
    kept = hidden_states(model, batch).detach()
    for module in model.modules():
        module.__dict__.pop("forward", None)
    inputs = {"input_ids": batch.tokens_T[None], "position_ids": batch.positions_T[None], "use_cache": False}
    model.set_attn_implementation("eager")
    straight = decoder(model)(**inputs).last_hidden_state[0]
    assert (kept[:5] - straight[:5]).abs().max() < 1e-4
    assert (kept[5:] - straight[5:]).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_other_documents_come_out_bit_for_bit_the_same_when_one_changes(name: str, folders: dict[str, Path]) -> None:
    model = load_ours(name, folders[name])
    # A product rounds by its number of rows, and another document brings an expert other rows: each token goes alone.
    for experts in find_experts(model).values():
        experts.forward = one_token_at_a_time(experts.forward)
    start, end = pack(DOCUMENTS[0]).cu_seqlens_S1[2:4].tolist()
    changed = [document(len(d), seed=99) if i == 2 else d for i, d in enumerate(DOCUMENTS[0])]
    with torch.no_grad():
        before_TH, after_TH = (hidden_states(model, pack(documents)) for documents in (DOCUMENTS[0], changed))
    assert not torch.equal(before_TH[start:end], after_TH[start:end])
    assert torch.equal(before_TH[:start], after_TH[:start]) and torch.equal(before_TH[end:], after_TH[end:])


def one_token_at_a_time(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forwards(*tensors: Tensor) -> Tensor:
        return torch.cat([forward(*parts) for parts in zip(*(tensor.split(1) for tensor in tensors), strict=True)])

    return forwards
