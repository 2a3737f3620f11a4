"""The `tokenizer` stage: byte-level BPE trained on text, or an imported Hugging Face tokenizer.

Artifact: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`: a
folder for `AutoTokenizer.from_pretrained`. An imported tokenizer keeps its chat template; without one, it
gets ours if it has the special tokens of our template. It loses its run-time state (metric `set_aside`).

Invariants: encoding only adds the begin-of-document token in front; decoding restores the text exactly (no
normaliser, byte level); ids of special tokens are those of Apertus (`data/tokens/vocabulary.py`); the
same text gives the same bytes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from apertus_model.chat.template import CONTROL_TOKENS, END_OF_TURN, template_source
from apertus_model.data.documents.parsed import fix_of
from apertus_model.data.documents.readers import Rejection, source_documents
from apertus_model.data.tokens.vocabulary import BOS, EOS, PAD, config_files, train
from apertus_model.files import copy_folder
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.tokenizer_files import load_tokenizer, open_folder, set_state_aside
from infra.store import Attempt
from infra.store.hugging_face import TOKENIZER_FILES
from infra.store.inputs import SourceError
from specs.errors import counts_in_words
from specs.foreign import ForeignError, checked, parse_json, read_local
from specs.hugging_face_files import TokenizerConfig
from specs.sources import SourceSpec
from specs.stages.tokenizer import TokenizerPart

TRIED = " A\tb\n\n \u00c9 e\u0301 \ufb01 \uff11234 \u65e5\u672c don't <x>  \u2581y \U0001f917 "
"""A text with what normalisers and pre-tokenisers change: spaces, case, accents, widths, digits, scripts."""


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source without text, and for a folder that holds no usable tokenizer
    or that transformers opens as another one; TokenizerError for one that cannot be opened."""
    part = TokenizerPart.model_validate(attempt.job.spec)
    metrics: dict[str, Any] = {}
    if part.path is not None:
        folder = copy_folder(part.path, attempt.workdir, TOKENIZER_FILES)
        if not (folder / "tokenizer.json").exists():
            raise SourceError(
                f"the tokenizer folder {part.path} has no tokenizer.json (a fast tokenizer of Hugging Face)"
            )
        specials = _special_tokens(folder, part.path)
        tokenizer = load_tokenizer(folder / "tokenizer.json", f"{part.path}/tokenizer.json")
        if state := set_state_aside(tokenizer):
            tokenizer.save(str(folder / "tokenizer.json"))
            progress.log(
                f"tokenizer.json of {part.path} states {', '.join(state)}, which would change the tokens of"
                " texts: set aside"
            )
        metrics["set_aside"] = state
        _check_as_transformers(tokenizer, folder, part.path)
        if unknown := [token for token in specials.values() if tokenizer.token_to_id(token) is None]:
            raise SourceError(
                f"the tokenizer folder {part.path} states {', '.join(unknown)}, which its tokenizer.json does"
                " not have"
            )
    else:
        rejected = Counter[str]()
        texts = [list(_texts(source, part.bytes_per_source, rejected)) for source in part.sources]
        metrics["rejected"] = dict(rejected)
        progress.update(0, 1, "tokenizers")
        tokenizer = train([text for source in texts for text in source], part.vocab_size, part.reserved)
        folder = attempt.workdir
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, document in config_files().items():
            (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        specials = {"bos": BOS, "eos": EOS, "pad": PAD}
        metrics["bytes_per_token"] = [_bytes_per_token(tokenizer, source) for source in texts]
        metrics["bytes_read"] = [sum(len(text.encode()) for text in source) for source in texts]
    size = 1 + max(tokenizer.get_vocab().values())  # not the number of tokens: ids may have gaps
    if size > part.vocab_size:
        least = -(-size // 128) * 128
        raise SourceError(
            f"the tokenizer has ids up to {size - 1}, too many for vocab_size {part.vocab_size}. Fix:"
            f" set vocab_size: {least}"
        )
    has_control_tokens = all(tokenizer.token_to_id(token) is not None for token in CONTROL_TOKENS)
    if has_control_tokens and not _has_chat_template(folder):
        (folder / "chat_template.jinja").write_text(template_source(), encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            attempt.put(folder / name, name)
    facts: dict[str, Any] = {"vocab_size": part.vocab_size}
    for role, token in specials.items():
        facts |= {f"{role}_token": token, f"{role}_id": tokenizer.token_to_id(token)}
    turn = tokenizer.token_to_id(END_OF_TURN)
    facts |= {"end_of_turn_token": None if turn is None else END_OF_TURN, "end_of_turn_id": turn}
    progress.update(1, 1, "tokenizers")
    attempt.commit(metrics={"vocab_size": part.vocab_size, "tokens": size, **metrics}, facts=facts)


def _texts(source: SourceSpec, limit: int, rejected: Counter[str]) -> Iterator[str]:
    """Yields documents of a source up to `limit` bytes of UTF-8, the last one cut, and counts what is
    rejected. SourceError when there is no document."""
    left, documents = limit, 0
    for _, _, document in source_documents(source):
        if isinstance(document, Rejection):
            rejected[document.reason] += 1
            continue
        encoded = document.text.encode()
        piece = encoded[:left].decode("utf-8", errors="ignore")
        left -= len(encoded)
        documents += 1
        yield piece
        if left <= 0 or documents == source.limit:
            return
    if not documents:
        raise SourceError(
            f"there is no document in the files of {source.url}; rejected: {counts_in_words(rejected)}."
            f" Fix: {fix_of(rejected, f'correct its format ({source.format}) or its globs')}"
        )


def _bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """The bytes per token of the training text; special tokens are not counted."""
    tokens = sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts, add_special_tokens=False))
    return round(sum(len(text.encode()) for text in texts) / max(1, tokens), 4)


def _check_as_transformers(tokenizer: Tokenizer, folder: Path, url: str) -> None:
    """SourceError when transformers, which opens what a folder states, makes other tokens than its
    tokenizer.json: a model would read others than it was trained on."""
    theirs = open_folder(folder, name=url)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for text in (TRIED, TRIED.lstrip(), *(f"a {token} b{token}c" for token in added)):
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        if theirs(text, add_special_tokens=False)["input_ids"] != ours:
            raise SourceError(
                f"transformers opens the tokenizer folder {url} as {type(theirs).__name__}, whose tokens of"
                f" {text!r} are not those of its tokenizer.json. Fix: set tokenizer_class:"
                " PreTrainedTokenizerFast in its tokenizer_config.json, and the options of its"
                " added_tokens_decoder as in tokenizer.json"
            )


def _stated(file: Path, url: str = "") -> dict[str, Any]:
    """The content of one of the two special-token files, {} if missing. SourceError when it is damaged."""
    try:
        document = parse_json(read_local(file)) if file.exists() else {}
        checked(TokenizerConfig, document)
    except ForeignError as error:
        raise SourceError(f"{file.name} of the tokenizer folder {url} cannot be read: {error}") from error
    return dict(document)


def _has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer folder has a chat template, as a file or in its config."""
    return (folder / "chat_template.jinja").exists() or bool(
        _stated(folder / "tokenizer_config.json").get("chat_template")
    )


def _special_tokens(folder: Path, url: str) -> dict[str, str]:
    """The begin, end and padding tokens of an imported folder; the padding token is optional. SourceError
    when the begin or end token is not stated."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= _stated(folder / name, url)
    tokens: dict[str, str] = {}
    for role in ("bos", "eos", "pad"):
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[role] = text
        elif role != "pad":
            raise SourceError(
                f"the tokenizer folder {url} states no {role}_token. Fix: name it in its"
                " tokenizer_config.json"
            )
    return tokens
