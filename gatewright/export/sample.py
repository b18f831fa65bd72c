"""The documents that an export reads: some of the training data for importance, others, held out, for comparison."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gatewright.data.documents import read_rows
from gatewright.data.template import Document, Renderer
from gatewright.data.tokenizer import load_tokenizer
from gatewright.export.study import Sample
from gatewright.spec.errors import DataError

ROWS = 4096
"""Rows of a file that are looked at, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Which data, and how much of it."""

    train: Path
    heldout: Path | None
    """None: the last documents of the training data, which are then not read for importance."""
    template: str | None
    """Path of a chat template in place of the tokenizer's own."""
    calibration_tokens: int
    check_tokens: int
    document_tokens: int
    """Documents are cut off after so many tokens."""
    prompts: int
    answer_tokens: int


def draw(request: SampleRequest, model: Path) -> Sample:
    """The documents as tokens of the model's tokenizer. Raises DataError for data that cannot be read or rendered."""
    renderer = Renderer(load_tokenizer(model), template=request.template)
    train = _documents(request.train, renderer)
    if request.heldout is None:
        heldout = list(_up_to(reversed(train), request.check_tokens, request.document_tokens))
        train = train[: len(train) - len(heldout)]
        if not train:
            raise DataError(
                f"{request.train}: too few documents to hold some out for the comparison; give other documents with "
                "--heldout"
            )
    else:
        heldout = list(
            _up_to(_documents(request.heldout, renderer), request.check_tokens, request.document_tokens)
        )  # fmt: skip
    prompts = [document.tokens[: document.is_target.index(True)] for document in heldout if True in document.is_target]
    return Sample(
        calibration=[
            document.tokens[: request.document_tokens]
            for document in _up_to(train, request.calibration_tokens, request.document_tokens)
        ],
        heldout=[document.tokens[: request.document_tokens] for document in heldout],
        prompts=[prompt[: request.document_tokens] for prompt in islice(filter(None, prompts), request.prompts)],
        answer_tokens=request.answer_tokens,
    )


def _documents(file: Path, renderer: Renderer) -> list[Document]:
    found = renderer.documents(list(islice(read_rows(file), ROWS)))
    return [document for document in found if len(document.tokens) > 1]


def _up_to(documents: Iterable[Document], tokens: int, document_tokens: int) -> Iterable[Document]:
    """Documents until they hold that many tokens; one at least."""
    held = 0
    for document in documents:
        yield document
        held += min(len(document.tokens), document_tokens)
        if held >= tokens:
            return
