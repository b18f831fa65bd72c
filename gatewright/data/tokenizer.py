"""The tokenizer of a local model folder; nothing is fetched and no code of the folder is run."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gatewright.spec.errors import ModelError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The folder's fast tokenizer, with its chat template.

    Raises ModelError when there is no such folder, no tokenizer in it, or only one that gives no character offsets.
    """
    if not folder.is_dir():
        raise ModelError(
            f"no folder {str(folder)!r}; give the local folder of a model (models are never fetched from a hub)"
        )
    if not (folder / "tokenizer.json").exists():
        raise ModelError(
            f"{folder}: no tokenizer.json in it, so no fast tokenizer, which alone can say which characters a token "
            "came from; copy it from the model's source, or convert the slow one with transformers"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a damaged tokenizer file makes of the library
        what = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ModelError(
            f"{folder}: the tokenizer cannot be read ({what}); copy tokenizer.json and tokenizer_config.json again"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{folder}: {type(tokenizer).__name__} cannot say which characters a token came from, so loss could not be "
            "put on the assistant's words alone; a fast tokenizer is needed"
        )
    return tokenizer
