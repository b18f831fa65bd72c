"""Data, templates, tokens, the hub, and the way to GGUF."""

import re
from dataclasses import replace

from gatewright.doctor.cause import Cause, Log, Role, Seen, env, plain_finding, sign
from gatewright.spec.finding import Finding

_REFUSED = re.compile(r"[Gg]ated ?[Rr]epo|not in the authorized list|\b40[13] Client Error|\b40[13] Forbidden")


def hub_offline(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The hub, unless a checkpoint is what was not found; an answer that refuses is no missing network."""
    if "resume_not_found" in log.kinds:
        return None
    if not any(_REFUSED.search(sighting.line) for sighting in seen.sightings):
        return plain_finding(cause, seen, log)
    found = plain_finding(
        cause,
        seen,
        log,
        text="The hub answers and refuses: the model is gated or private, and no token that may read it was sent.",
        fix=("Accept its conditions on the model's page, and log in where it is fetched (HF_TOKEN).", *cause.fix),
    )
    return replace(found, kind="hub_access", changes=())


FULL_ENOUGH = 0.85


def padding(cause: Cause, seen: Seen, log: Log) -> Finding | None:
    """The share of the batches' positions that hold no token, where it is worth a change."""
    fill = min(float(sighting.groups["fill"]) for sighting in seen.sightings)
    if fill >= FULL_ENOUGH:
        return None
    text = f"{1 - fill:.0%} of the positions in a batch hold no token."
    return plain_finding(cause, seen, log, text=text, numbers=(("fill", fill),))


CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW590",
        name="chat-template",
        kind="chat_template",
        title="The chat template is missing or refuses the conversation",
        confidence="certain",
        signs=(
            sign(
                "chat_template",
                "chat template",
                pattern=(
                    r"tokenizer\.chat_template is not set|[Cc]annot use (?:apply_)?chat[_ ]template|[Nn]o chat "
                    r"template|chat[_ ]template.*(?:not (?:set|defined|found|supported)|missing|is None|does not "
                    r"(?:support|have|contain)|fail|error|[Rr]aise)"
                ),
            ),
            sign(
                "TemplateError",
                "TemplateSyntaxError",
                "UndefinedError",
                pattern=(
                    r"(?:jinja2\.exceptions\.)?(?:TemplateError|TemplateSyntaxError|UndefinedError)(?:: "
                    r"(?P<reason>.+))?"
                ),
            ),
            sign(
                "Conversation roles must alternate",
                "roles must alternate",
                "System role not supported",
                "System message must be",
                "Only user and assistant roles",
            ),
            sign("generation %}", pattern=r"return_assistant_tokens_mask.*\{% generation %\}"),
            sign(
                "response template",
                "Could not find response key",
                "instruction template",
                pattern=r"Could not find (?:response|instruction) (?:key|template)",
            ),
        ),
        text="The chat template is missing, or does not take this conversation.",
        why="Base models have none; some refuse system turns, or two turns of one role. After a stage with "
        "another template the "
        "tokenizer holds the last one.",
        fix=("Give a template in the run file, and render ten rows of the data with it before the run.",),
        outranks=4,
    ),
    Cause(
        code="GW591",
        name="special-tokens",
        kind="special_tokens",
        title="Padding or special tokens",
        signs=(
            sign(
                "padding token",
                "pad_token",
                pattern=(
                    r"does not have a padding token|[Aa]sking to pad but the tokenizer does not have|"
                    r"pad_token.*(?:not set|is None|must be)"
                ),
            ),
            sign("index out of range in self"),
            sign("IndexError: index", pattern=r"IndexError: index (?P<index>\d+) is out of bounds.*(?:embed|vocab)"),
        ),
        text="A special token is missing or beyond the embedding.",
        why="Tokens were added without enlarging the embedding, or padding needs a token that is not set.",
        fix=(
            "Set the pad token to one that exists and is not the end of a turn; resize the embedding for added tokens.",
        ),
        outranks=3,
    ),
    Cause(
        code="GW594",
        name="data-unreadable",
        kind="data",
        title="The data set cannot be read",
        signs=(
            sign(
                "DatasetGenerationError",
                "DatasetGenerationCastError",
                "DataFilesNotFoundError",
                "ArrowInvalid",
                "JSON parse error",
                "EmptyDatasetError",
            ),
            sign(
                "EmptyDataset",
                "num_samples=",
                pattern=(
                    r"num_samples should be a positive integer value, but got num_samples=0|[Dd]ataset is empty|[Nn]o "
                    r"(?:valid )?(?:training )?(?:samples|examples) (?:left|found|remain)"
                ),
            ),
            sign("UnicodeDecodeError"),
        ),
        text="The data set cannot be read, or nothing is left of it.",
        why="Rows with different fields, a cut-off file, or a filter that removed everything.",
        fix=("Look at the data before training: gatewright data inspect FILE --model FOLDER.",),
        outranks=3,
    ),
    Cause(
        code="GW523",
        name="batches-half-empty",
        kind="health",
        title="Batches with much room left",
        role=Role.HINT,
        severity="warning",
        confidence="certain",
        signs=(
            sign(
                "sample_packing_eff_est",
                '"fill": ',
                pattern=(
                    r"(?:sample_packing_eff_est across ranks: \[|\"fill\": )(?:np\.float\d+\()?"
                    r"(?P<fill>[01](?:\.\d+)?)"
                ),
            ),
        ),
        text="A part of the positions in a batch holds no token.",
        why="The limit on a document's length is far above what the documents have, or few of them fit together. Each "
        "position costs time whether it holds a token or not, where batches are padded.",
        fix=("Look at the lengths (gatewright data inspect), and set the limit near their 99th percentile.",),
        judge=padding,
    ),
    Cause(
        code="GW592",
        name="hub-unreachable",
        kind="hub_offline",
        title="The model hub cannot be reached",
        signs=(
            sign(
                "LocalEntryNotFoundError",
                "OfflineModeIsEnabled",
                "offline mode",
                pattern=r"LocalEntryNotFoundError|OfflineModeIsEnabled|[Oo]ffline mode is enabled",
            ),
            sign(
                "huggingface.co",
                pattern=(
                    r"(?:[Cc]ouldn't|[Cc]ould not|[Cc]annot|[Ff]ailed to|Max retries|Connection|[Uu]nable "
                    r"to).{0,160}huggingface\.co|huggingface\.co.{0,200}(?:Max retries|timed out|Name or service|"
                    r"Temporary failure|Connection|unreachable|resolve)"
                ),
            ),
            sign(
                "GatedRepoError",
                "RepositoryNotFoundError",
                "gated repo",
                pattern=(
                    r"GatedRepoError|RepositoryNotFoundError|[Yy]ou are trying to access a gated repo|restricted and "
                    r"you are not in the authorized list"
                ),
            ),
            sign(
                "HfHubHTTPError",
                "Client Error",
                pattern=r"(?:HfHubHTTPError|HTTPError).{0,80}(?:401|403|404|429)|(?:401|403|429) Client Error",
            ),
            sign("Name or service not known", "Temporary failure in name resolution", "NameResolutionError"),
            sign(
                "is not a local folder and is not a valid model identifier",
                "Can't load tokenizer for",
                "does not appear to have a file named",
            ),
        ),
        text="A model or data set was to be fetched, and the hub cannot be reached, refuses, or does not have it.",
        why="Compute nodes have no way to the internet, or a token is missing.",
        fix=(
            (
                "Fetch it on the login node, give the local folder, and set the offline switch so that a miss "
                "fails at once."
            ),
        ),
        changes=(env("HF_HUB_OFFLINE", "1"), env("HF_HOME", "a folder on scratch")),
        judge=hub_offline,
        outranks=3,
    ),
    Cause(
        code="GW593",
        name="gguf-conversion",
        kind="gguf_convert",
        title="The conversion to GGUF stops",
        confidence="certain",
        signs=(
            sign("map tensor", pattern=r"Can ?not map tensor '(?P<tensor>[^']+)'"),
            sign(
                "Unprocessed experts",
                "BPE pre-tokenizer was not recognized",
                "get_vocab_base_pre",
                "convert_hf_to_gguf",
                pattern=(
                    r"Unprocessed experts|pre-tokenizer was not recognized|get_vocab_base_pre|"
                    r"convert_hf_to_gguf.*(?:[Ee]rror|not supported|failed)"
                ),
            ),
            sign(
                "Architecture",
                "hf-to-gguf",
                "Model architecture",
                pattern=(
                    r"hf-to-gguf.*not supported|(?:NotImplementedError|ERROR|Error|"
                    r"error).*(?:Architecture|Model architecture|Model) "
                    r"'?(?P<architecture>\w+)'? (?:is )?not supported|Model \w+ is not supported"
                ),
            ),
            sign(
                "tokenizer.model",
                "vocab",
                pattern=(
                    r"(?:FileNotFoundError|File not found).*tokenizer\.model|[Cc]annot find (?:a )?tokenizer|Vocab "
                    r"size mismatch|vocab size mismatch"
                ),
            ),
            sign("opt_num_mtp_layers", "nextn", pattern=r"opt_num_mtp_layers|nextn.*(?:missing|error)"),
            sign("Not a lora_A or lora_B tensor"),
            sign("Quant method is not yet supported", pattern=r"Quant method is not yet supported: '(?P<method>\w+)'"),
        ),
        text="The converter to GGUF does not know a tensor, the tokenizer, or the architecture of this model.",
        why="Quantised weights (bitsandbytes, GPTQ), an adapter that was not merged, a tokenizer that was "
        "changed, or a converter "
        "older than the model.",
        fix=("Convert the merged 16-bit weights with a current converter.",),
        outranks=5,
    ),
    Cause(
        code="GW598",
        name="gguf-load",
        kind="gguf_load",
        title="A GGUF file does not load",
        signs=(
            sign(
                "missing tensor",
                "wrong number of tensors",
                "unknown model architecture",
                "unknown pre-tokenizer",
                pattern=(
                    r"missing tensor '(?P<tensor>[^']+)'|wrong number of tensors|unknown model architecture: "
                    r"'(?P<architecture>[^']+)'|unknown pre-tokenizer type"
                ),
            ),
            sign(
                "llama_model_load",
                "llama_load_model_from_file",
                "gguf_init_from_file",
                pattern=(
                    r"(?:llama_model_load|llama_load_model_from_file|gguf_init_from_file\w*):? .*(?:error|failed|"
                    r"invalid)"
                ),
            ),
        ),
        text="llama.cpp does not load the file: a tensor or an architecture it does not know.",
        why=(
            "The file was written by a newer or older converter, or lacks tensors that the trainer dropped "
            "(MTP layers)."
        ),
        fix=("Convert again with the converter of the same release; pass --no-nextn where MTP tensors are absent.",),
        outranks=5,
    ),
)
