"""The process that llama.cpp's converter runs in: `python -P -m gatewright.export.official_process PRE SCRIPT …`.

The converter knows pre-tokenizers by the hash of what they make of one text, so one that was trained last night stops
it. PRE is what `vocabulary` found by reading tokenizer.json, or nothing; it is used only where the hash is unknown.
"""

import runpy
import sys

from conversion.base import TextModel
from transformers import PreTrainedTokenizerBase

pre, script, *arguments = sys.argv[1:]
by_hash = TextModel.get_vocab_base_pre


def name_of(model: TextModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The converter's own answer, or PRE."""
    try:
        return str(by_hash(model, tokenizer))
    except NotImplementedError:
        if not pre:
            raise
        return pre


TextModel.get_vocab_base_pre = name_of
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
