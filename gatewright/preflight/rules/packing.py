"""GW6xx: packing and data. Documents that see each other, padding that is paid for, and tokens that teach nothing."""

from gatewright.preflight.fault import Fault, Rule, add_after, drop, set_to
from gatewright.preflight.job import Job

_PREFERENCE = ("dpo", "kto", "orpo", "simpo", "ipo", "rm", "bco")


def padded_batches(job: Job) -> Fault | None:
    """Without packing every row of a micro-batch is as long as its longest one: up to 60 % of the compute is padding. A
    shorter max_seq_len does not help much, since rows pad to their own longest: 8,192 to 4,096 gave 1.2 ×, not 4 ×."""
    if (
        job.packing.value is not False
        or not job.micro_batch.given
        or job.micro_batch.get(1) < 2
        or job.task.get("sft") != "sft"
    ):
        return None
    if job.pad_to_max.value:
        return None
    return Fault(
        f"no packing with {job.micro_batch.value} rows a micro-batch: short documents pay for the longest",
        (job.packing, job.micro_batch),
        "pack, if the attention kernel keeps documents apart; or one row a micro-batch and more accumulation",
        set_to(job.packing, True),
    )


def pads_every_row_to_the_limit(job: Job) -> Fault | None:
    """Without packing, pad_to_sequence_len makes every row as long as the limit, whatever is in it."""
    if not job.pad_to_max.value or job.packing.value or job.task.get("sft") != "sft":
        return None
    return Fault(
        f"{job.pad_to_max} without packing: every row costs {job.max_tokens.get(0):,} tokens",
        (job.pad_to_max, job.packing),
        "pack, or let rows pad to the longest of their batch",
        set_to(job.pad_to_max, False),
    )


def limit_above_the_data(job: Job) -> Fault | None:
    """A limit far above the data's 99th percentile buys memory for documents that hardly exist; the peak follows the
    longest one all the same."""
    limit, p99 = job.max_tokens, job.p99_tokens
    if p99 is None or limit.value is None or limit.value <= 2 * p99 or job.packing.value:
        return None
    return Fault(
        f"{limit}, and 99 % of the documents are below {p99:,} tokens",
        (limit,),
        f"start at the 99th percentile: {-(-p99 // 64) * 64}",
        set_to(limit, -(-p99 // 64) * 64),
    )


def limit_below_the_data(job: Job) -> Fault | None:
    """More than one document in a hundred is cut or dropped, and what is cut is the end: the answer."""
    limit, p99 = job.max_tokens, job.p99_tokens
    if p99 is None or limit.value is None or limit.value >= p99:
        return None
    return Fault(
        f"{limit}, but the 99th percentile of the documents is {p99:,} tokens: over 1 % lose their end",
        (limit,),
        f"raise it to {-(-p99 // 64) * 64}, or split long documents on purpose",
        set_to(limit, -(-p99 // 64) * 64),
    )


def packed_documents_see_each_other(job: Job) -> Fault | None:
    """Packed rows keep documents apart only in kernels that are told the boundaries. In transformers 5.24 packed
    position_ids attend across documents under eager and sdpa unless use_cache is off, silently."""
    if not job.packing.value or not job.uses("trl", "swift"):
        return None
    if job.attention.value not in ("eager", "sdpa") or job.packing_strategy.value == "wrapped":
        return None
    return Fault(
        f"{job.packing} with {job.attention}: attention crosses from one document into the next",
        (job.attention, job.packing),
        "use flash_attention_2",
        set_to(job.attention, "flash_attn" if job.uses("swift") else "flash_attention_2"),
    )


def packing_without_a_kernel(job: Job) -> Fault | None:
    """axolotl isolates packed samples only in the kernels it patches; with no attention named it packs without."""
    if not job.packing.value or not job.uses("axolotl") or job.attention.value is not None:
        return None
    return Fault(
        f"{job.packing} and no attention kernel is named: samples may see each other",
        (job.packing,),
        "add attn_implementation: flash_attention_2",
        add_after(job.packing, "attn_implementation: flash_attention_2"),
    )


def packing_that_is_not_neat(job: Job) -> Fault | None:
    """LLaMA-Factory's `packing` alone joins documents under one causal mask; `neat_packing` keeps them apart."""
    if not job.uses("llamafactory") or not job.packing.value or job.isolated.value or job.task.get("sft") != "sft":
        return None
    return Fault(
        f"{job.packing} without neat_packing: each document attends to those before it in the row",
        (job.packing,),
        "add neat_packing: true",
        add_after(job.packing, "neat_packing: true"),
    )


def wrapped_packing(job: Job) -> Fault | None:
    """TRL's `wrapped` strategy joins all tokens and cuts every max_length, through documents and across them."""
    if job.packing_strategy.value != "wrapped" or not job.packing.value:
        return None
    return Fault(
        f"{job.packing_strategy} cuts documents anywhere and joins them without a boundary",
        (job.packing_strategy,),
        "use bfd",
        set_to(job.packing_strategy, "bfd"),
    )


def thd_on_rocm(job: Job) -> Fault | None:
    """Transformer Engine's packed (THD) kernel hangs or aborts in its first forward pass on ROCm; AMD's own stack ships
    with it off and packs under one causal mask instead."""
    if not job.amd or not job.packing.value or not job.uses("megatron", "swift-megatron"):
        return None
    return Fault(
        f"{job.packing} with Megatron on {job.card}: the THD kernel of Transformer Engine hangs there",
        (job.packing,),
        "test one step first, or use a stack whose varlen attention runs on ROCm",
    )


def ring_that_ignores_packing(job: Job) -> Fault | None:
    """The batch_ring kernel knows no document boundaries: with sample packing the loss was 1.83 times what it should
    be."""
    if job.ring.value != "batch_ring" or not job.packing.value:
        return None
    return Fault(
        f"{job.ring} with sample packing: boundaries are ignored",
        (job.ring, job.packing),
        "use varlen_llama3 or varlen_ring",
        set_to(job.ring, "varlen_llama3"),
    )


def recurrent_layers_leak(job: Job) -> Fault | None:
    """Linear-attention layers carry a state from token to token. Unless cu_seqlens reach their kernel it runs on from
    one packed document into the next; several trainers pass them to the attention layers only."""
    shape = job.shape
    if not job.packing.value or shape is None or job.uses("gatewright"):
        return None
    recurrent = sum(layer.attention is not None and layer.attention.kind == "linear" for layer in shape.layers)
    if not recurrent:
        return None
    return Fault(
        f"{job.packing}: {recurrent} of {len(shape.layers)} layers of {shape.name} are recurrent and may carry state "
        "across documents",
        (job.packing, job.model),
        "change one document of a pack and see that no other one's logits move",
    )


def cache_while_packing(job: Job) -> Fault | None:
    """With use_cache the packed position_ids are not recognised: eager and sdpa attend across documents (logits differ
    by 0.46)."""
    if not (job.use_cache.value and job.packing.value):
        return None
    return Fault(
        f"{job.use_cache} with packing: document boundaries are not seen",
        (job.use_cache,),
        "set it to false in training",
        set_to(job.use_cache, False),
    )


def packing_preference_pairs(job: Job) -> Fault | None:
    """Pairs of chosen and rejected answers cannot be packed; the trainers refuse, or ignore the option."""
    if not job.packing.value or job.task.value not in _PREFERENCE:
        return None
    return Fault(
        f"{job.packing} with {job.task.value}: pairs are not packed",
        (job.packing, job.task),
        "take packing out",
        set_to(job.packing, False),
    )


def long_documents_are_dropped(job: Job) -> Fault | None:
    """LLaMA-Factory's packer drops what is longer than cutoff_len, with a line in the log."""
    if not job.uses("llamafactory") or not job.packing.value or job.max_tokens.value is None:
        return None
    if job.p99_tokens is not None and job.p99_tokens <= job.max_tokens.value:
        return None
    return Fault(
        f"{job.packing}: documents longer than {job.max_tokens.value:,} tokens are dropped, not cut",
        (job.max_tokens, job.packing),
        "compare cutoff_len with the lengths of the data first",
    )


def sequence_not_divided_by_ring(job: Job) -> Fault | None:
    """Ring attention cuts a sequence into 2 × cp equal pieces, to balance the causal mask."""
    pieces = 2 * job.cp.get(1)
    if not job.uses("megatron", "swift-megatron") or pieces < 4 or job.max_tokens.get(0) % pieces == 0:
        return None
    return Fault(
        f"{job.max_tokens} is no multiple of 2 × {job.cp.value}",
        (job.max_tokens, job.cp),
        f"use {-(-job.max_tokens.get(0) // pieces) * pieces}",
        set_to(job.max_tokens, -(-job.max_tokens.get(0) // pieces) * pieces),
    )


def pad_is_eos(job: Job) -> Fault | None:
    """Collators mask the loss of padding by its token. Where padding is the end token, the end of every answer is
    masked too, and the model never learns to stop."""
    pad, eos = job.pad_token, job.eos_token
    if pad.value is None or pad.value != eos.value:
        return None
    return Fault(
        f"{pad} is the end token as well: it is masked, and the model does not learn to stop",
        (pad, eos),
        "name another token for padding, one the vocabulary has unused",
    )


def no_template_named(job: Job) -> Fault | None:
    """LLaMA-Factory formats prompts by a template of its own; without one it falls back, and serving with the model's
    template shows the model another format than it was trained on."""
    if not job.uses("llamafactory") or not job.trains or job.task.value == "pretrain":
        return None
    if job.template.value not in (None, "default", "empty"):
        return None
    return Fault(
        f"{job.template if job.template.given else 'no template'}: prompts are not in {job.model.get('the model')}'s "
        "own format",
        (job.template if job.template.given else job.model,),
        "name the model's template, such as qwen3 or llama3",
    )


def trains_on_the_prompt(job: Job) -> Fault | None:
    """The loss counts the user's words too: the model learns to write questions, and short answers weigh little."""
    if not job.train_on_prompt.value:
        return None
    return Fault(
        f"{job.train_on_prompt}: the loss counts prompts as well as answers",
        (job.train_on_prompt,),
        "train on the answers alone, unless this is pre-training",
        set_to(job.train_on_prompt, False),
    )


def new_tokens_without_embeddings(job: Job) -> Fault | None:
    """A new token has a random row in the embedding. An adapter leaves that row as it is unless the embedding and the
    head are trained with it; a row beyond the table is a device-side assert."""
    if not job.new_tokens.get(()) or not job.lora:
        return None
    saved = {name.rpartition(".")[2] for name in job.lora_modules_to_save.get(())}
    if {"embed_tokens", "lm_head"} <= saved:
        return None
    return Fault(
        f"{job.new_tokens.key} adds {len(job.new_tokens.get(()))} tokens, and the adapter trains neither embed_tokens "
        "nor lm_head",
        (job.new_tokens, job.lora_modules_to_save),
        "add both to modules_to_save (LLaMA-Factory: additional_target)",
    )


def new_tokens_without_rows(job: Job) -> Fault | None:
    """LLaMA-Factory adds tokens to the tokenizer and resizes the embedding only when asked: an id beyond the table
    stops the GPU with a device-side assert."""
    if not job.uses("llamafactory") or not job.new_tokens.get(()) or job.resize_vocab.value:
        return None
    return Fault(
        f"{job.new_tokens.key} without resize_vocab: new ids point beyond the embedding",
        (job.new_tokens,),
        "add resize_vocab: true",
        add_after(job.new_tokens, "resize_vocab: true"),
    )


def prompt_fills_the_sequence(job: Job) -> Fault | None:
    """Where a prompt may be as long as the whole row, its answer is cut away: every label is masked and the loss is
    NaN or 0."""
    prompt, limit = job.max_prompt_tokens, job.max_tokens
    if prompt.value is None or limit.value is None or prompt.value < limit.value:
        return None
    return Fault(
        f"{prompt} leaves no room for an answer in {limit}",
        (prompt, limit),
        "leave the answers their length",
        set_to(prompt, limit.value // 2),
    )


def stream_without_an_end(job: Job) -> Fault | None:
    """A streamed data set has no length, so the number of steps must be said."""
    if not job.streaming.value or job.max_steps.get(0) > 0:
        return None
    return Fault(
        f"{job.streaming} without max_steps: the run has no length",
        (job.streaming,),
        "give max_steps",
    )


def code_from_the_model_folder(job: Job) -> Fault | None:
    """trust_remote_code runs Python from the model's folder with your rights, on every rank."""
    if not job.trust_remote_code.value:
        return None
    return Fault(
        f"{job.trust_remote_code}: code from {job.model.get('the model')} runs with your rights",
        (job.trust_remote_code,),
        "leave it off where transformers knows the architecture; else read the code and pin its revision",
    )


def credential_in_a_file(job: Job) -> Fault | None:
    """A config is copied beside every checkpoint and into trackers, and a credential in it goes along."""
    if not job.secrets:
        return None
    return Fault(
        f"{job.secrets[0].key} holds a credential",
        job.secrets,
        "take it from the environment of the job, and replace it: it has been written down",
        drop(job.secrets[0]),
    )


_PACK = "measured with transformers 5.24"
RULES = (
    Rule("GW601", "warning", padded_batches, "measured: a campaign went from 8,192 to 4,096 tokens and gained 1.2 ×"),
    Rule("GW602", "warning", pads_every_row_to_the_limit, "axolotl 0.19, pad_to_sequence_len"),
    Rule("GW603", "note", limit_above_the_data, "rule of thumb: max_seq_len starts at the 99th percentile of the data"),
    Rule(
        "GW604", "warning", limit_below_the_data, "measured: TRL 1.16 cut 15 to 39 % of Wikipedia's tokens at 8k and 2k"
    ),
    Rule("GW605", "error", packed_documents_see_each_other, f"{_PACK}; huggingface/transformers#46093"),
    Rule("GW606", "warning", packing_without_a_kernel, "axolotl 0.19: check_sample_packing_without_attention"),
    Rule("GW607", "warning", packing_that_is_not_neat, "LLaMA-Factory 0.9.5, neat_packing"),
    Rule("GW608", "warning", wrapped_packing, "TRL 1.16, pack_dataset"),
    Rule("GW609", "warning", thd_on_rocm, "AMD-AGI/Primus, sft_trainer.yaml"),
    Rule("GW610", "error", ring_that_ignores_packing, "axolotl#3608, fixed by #3867 and #4002"),
    Rule("GW611", "warning", recurrent_layers_leak, "THUDM/slime#1686"),
    Rule("GW612", "error", cache_while_packing, _PACK, safe=True),
    Rule(
        "GW613", "error", packing_preference_pairs, "axolotl 0.19: check_sample_packing_w_rl; LLaMA-Factory: SFT only"
    ),
    Rule("GW614", "note", long_documents_are_dropped, "LLaMA-Factory 0.9.5, greedy_knapsack"),
    Rule("GW615", "error", sequence_not_divided_by_ring, "Transformer Engine, THD context parallelism"),
    Rule("GW651", "error", pad_is_eos, "axolotl and TRL docs, special tokens"),
    Rule("GW652", "warning", no_template_named, "huggingface/transformers#33246; alignment-handbook#93"),
    Rule("GW653", "note", trains_on_the_prompt, "axolotl train_on_inputs; LLaMA-Factory train_on_prompt"),
    Rule("GW654", "error", new_tokens_without_embeddings, "shibing624/MedicalGPT#275"),
    Rule("GW655", "error", new_tokens_without_rows, "shibing624/MedicalGPT#275; sillsdev/silnlp#1033"),
    Rule("GW656", "error", prompt_fills_the_sequence, "arithmetic"),
    Rule("GW657", "error", stream_without_an_end, "axolotl 0.19: check_streaming_w_max_steps"),
    Rule("GW658", "note", code_from_the_model_folder, "Gatewright's own default: no remote code unless said by name"),
    Rule("GW659", "error", credential_in_a_file, "Gatewright's own default: secrets only from the environment"),
)
