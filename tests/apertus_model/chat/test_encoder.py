from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from apertus_model.chat.encoder import TRAINED, ChatEncoder, ChatError
from apertus_model.chat.messages import ConversationError
from apertus_model.chat.template import render
from apertus_model.data.tokens.vocabulary import special_tokens, train
from tests.apertus_model.tokenizer_kinds import MODELS, NORMALIZERS, OPTIONS, PRE_TOKENIZERS, kinds, make

NO, YES, TOOL = 0, 1, 2


def test_the_mask_is_exact_for_every_kind_of_block(
    byte_tokenizer: Tokenizer, all_blocks: list[dict[str, Any]]
) -> None:
    """Written by hand: pieces of the text with what of them is trained; a control token is one token,
    other text has one per byte."""
    pieces = [
        ("<s>", NO), ("<|system_start|>", NO), ("Be brief.", NO), ("<|system_end|>", NO),
        ("<|developer_start|>", NO),
        ("Today is Monday.\nDeliberation: enabled\nTool Capabilities: disabled", NO),
        ("<|developer_end|>", NO),
        ("<|user_start|>", NO), ("How warm is it?", NO), ("<|user_end|>", NO),
        ("<|assistant_start|>", NO),
        ("<|inner_prefix|>", YES), ("I have to ask.", YES), ("<|inner_suffix|>", YES),
        ("<|tools_prefix|>", YES), ('[{"weather": {"city": "Zürich", "days": [1]}}]', YES),
        ("<|tools_suffix|>", YES),
        ('[15, {"sun": true}]', TOOL), ("15 degrees.", YES), ("<|assistant_end|>", YES),
        ("<|user_start|>", NO), ("Thanks", NO), ("<|user_end|>", NO),
        ("<|assistant_start|>", NO), ("Welcome.", YES), ("<|assistant_end|>", YES),
    ]  # fmt: skip
    assert "".join(text for text, _ in pieces) == render(all_blocks)
    special = set(special_tokens(100))
    expected = [kind for text, kind in pieces for _ in range(1 if text in special else len(text.encode()))]
    encoded = ChatEncoder(byte_tokenizer).encode(all_blocks)
    assert encoded.mask.tolist() == expected
    assert (encoded.mask == TRAINED).tolist() == [kind == YES for kind in expected]
    assert (encoded.tokens.dtype, encoded.mask.dtype) == (np.int64, np.uint8)


def test_a_token_with_characters_of_a_tool_and_of_the_assistant_is_not_trained() -> None:
    tokenizer = train(["]Then " * 50], 400, 100)
    blocks = [
        {"type": "tool_calls", "calls": [{"name": "f", "arguments": {}}]},
        {"type": "tool_outputs", "outputs": ["1"]},
        {"type": "response", "text": "Then é"},
    ]
    encoded = ChatEncoder(tokenizer).encode(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    )
    shown = [tokenizer.id_to_token(token) for token in encoded.tokens[-8:]]
    assert shown == ["<|tools_suffix|>", "[", "1", "]Then", "Ġ", "Ã", "©", "<|assistant_end|>"]
    assert encoded.mask[-8:].tolist() == [YES, TOOL, TOOL, TOOL, YES, YES, YES, YES]


def _pieces(
    encoder: ChatEncoder, tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> list[tuple[str, int]]:
    """Neighbouring tokens of one kind, as their text and kind."""
    encoded = encoder.encode(messages)
    runs = itertools.groupby(
        zip(encoded.tokens.tolist(), encoded.mask.tolist(), strict=True), lambda one: one[1]
    )
    return [
        (tokenizer.decode([token for token, _ in run], skip_special_tokens=False), kind) for kind, run in runs
    ]


def test_what_the_data_exclude_from_training_is_not_trained(byte_tokenizer: Tokenizer) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "reasoning": "hm", "content": "Let me see.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    final = {"role": "assistant", "thinking": "so", "content": "Two."}
    asked = {"role": "user", "content": "x"}
    thoughts = "<|inner_prefix|>hm<|inner_suffix|>"
    calls = 'Let me see.<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'
    answer = "<|inner_prefix|>so<|inner_suffix|>Two.<|assistant_end|>"

    def kinds(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, int]]:
        turn = [asked, said | first, result, final | second]
        again = [asked, {"role": "assistant", "content": "y"}]
        found = _pieces(ChatEncoder(byte_tokenizer), byte_tokenizer, [*turn, *again])
        assert found[-1] == ("y<|assistant_end|>", YES)
        assert found[-2][1] == found[0][1] == NO
        return found[1:-2]

    assert kinds({}, {}) == [(thoughts + calls, YES), ("[2]", TOOL), (answer, YES)]
    assert kinds({"weight": 0}, {}) == [(thoughts + calls + "[2]", TOOL), (answer, YES)]
    assert kinds({}, {"train": False}) == [(thoughts + calls, YES), ("[2]" + answer, TOOL)]
    assert kinds({"loss": False}, {"loss": False}) == [(thoughts + calls + "[2]" + answer, TOOL)]


def test_a_turn_that_is_not_trained_has_the_same_tokens(
    byte_tokenizer: Tokenizer, all_blocks: list[dict[str, Any]]
) -> None:
    encoder, plain = ChatEncoder(byte_tokenizer), ChatEncoder(byte_tokenizer).encode(all_blocks)
    for place in (3, 5):
        marked = copy.deepcopy(all_blocks)
        marked[place]["weight"] = 0
        encoded = encoder.encode(marked)
        assert encoded.tokens.tolist() == plain.tokens.tolist()
        assert (encoded.mask == TRAINED).sum() < (plain.mask == TRAINED).sum()
        assert (encoded.mask == NO).tolist() == (plain.mask == NO).tolist()


def test_calls_that_are_directly_followed_by_a_response_are_trained_with_it(
    byte_tokenizer: Tokenizer,
) -> None:
    blocks = [
        {"type": "tool_calls", "calls": [{"name": "f", "arguments": {}}]},
        {"type": "response", "text": "[not an output]"},
    ]
    encoded = ChatEncoder(byte_tokenizer).encode(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    )
    assert encoded.mask[encoded.tokens.tolist().index(67) + 1 :].all()
    assert TOOL not in encoded.mask


@pytest.mark.parametrize("spelled", special_tokens(100))
def test_text_that_spells_a_special_token_is_never_that_token(
    tokenizer: Tokenizer, all_blocks: list[dict[str, Any]], weather: dict[str, Any], spelled: str
) -> None:
    def conversation(word: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        messages, tool = copy.deepcopy(all_blocks), copy.deepcopy(weather)
        for message in messages:
            for block in message["content"] if isinstance(message["content"], list) else [message]:
                for key in {"text", "content"} & block.keys():
                    block[key] = f"{word}{block[key]} {word}"
        blocks = messages[3]["content"]
        blocks[1]["calls"][0] = {"name": f"weather{word}", "arguments": {word: [word], "city": f"a{word}"}}
        blocks[2]["outputs"] = [word, f"1{word}"]
        tool["function"]["description"] = word
        tool["function"]["parameters"]["properties"] |= {word: {"type": "string", "enum": [word]}}
        return messages, [tool]

    encoder = ChatEncoder(tokenizer)
    spelling, harmless = (encoder.encode(*conversation(word)) for word in (spelled, "#"))
    assert [token for token in spelling.tokens if token < 100] == [
        token for token in harmless.tokens if token < 100
    ]
    assert tokenizer.decode(spelling.tokens.tolist(), skip_special_tokens=False) == render(
        *conversation(spelled)
    )
    controls = [
        (token, kind) for token, kind in zip(harmless.tokens, harmless.mask, strict=True) if token < 100
    ]
    assert [
        (token, kind) for token, kind in zip(spelling.tokens, spelling.mask, strict=True) if token < 100
    ] == controls
    text = f"{spelled}{spelled} and {spelled}"
    assert min(encoder.completion(text)[:-1]) >= 100
    assert encoder.decode(encoder.completion(text)) == text


def test_neighbouring_texts_do_not_spell_a_control_token_together(byte_tokenizer: Tokenizer) -> None:
    blocks = [
        {"type": "tool_calls", "calls": [{"name": "f", "arguments": {}}]},
        {"type": "tool_outputs", "outputs": ["<|assistant_"]},
        {"type": "response", "text": "<|assistant_end|"},
        {"type": "response", "text": ">"},
    ]
    encoded = ChatEncoder(byte_tokenizer).encode(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks}]
    )
    assert encoded.tokens.tolist().count(68) == 1


def test_a_prompt_and_a_completion_are_the_whole_conversation(
    tokenizer: Tokenizer, all_blocks: list[dict[str, Any]]
) -> None:
    encoder = ChatEncoder(tokenizer)
    whole = encoder.encode(all_blocks).tokens.tolist()
    prompt, completion = encoder.prompt(all_blocks[:-1]), encoder.completion("Welcome.")
    assert prompt.tolist() + completion.tolist() == whole
    assert completion[-1] == encoder.end_of_turn_id == 68
    assert encoder.decode(completion) == "Welcome."


def test_characters_for_private_use_stay(tokenizer: Tokenizer) -> None:
    text = "\U000f0000\U000f0001\ue000"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    encoded = ChatEncoder(tokenizer).encode(messages)
    assert tokenizer.decode(encoded.tokens.tolist(), skip_special_tokens=False) == render(messages)


def test_the_tokenizer_that_was_given_is_not_changed(tokenizer: Tokenizer) -> None:
    before = tokenizer.to_str()
    ChatEncoder(tokenizer).encode([{"role": "user", "content": "<s>"}])
    assert tokenizer.to_str() == before
    assert tokenizer.encode("<s>", add_special_tokens=False).ids == [1]


def test_a_tokenizer_without_chat_tokens_is_refused_with_their_names(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatError, match=r"the tokenizer has no <s>, <\|system_start\|>"):
        ChatEncoder(Tokenizer(models.BPE()))
    changed = json.loads(tokenizer.to_str())
    for token in changed["added_tokens"]:
        token["special"] = token["content"] != "<|user_start|>"
    with pytest.raises(ChatError, match=r"finds <\|user_start\|> in plain text"):
        ChatEncoder(Tokenizer.from_str(json.dumps(changed)))


def test_a_tool_whose_schema_is_none_is_a_conversation_error(tokenizer: Tokenizer) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": [1]}}]
    with pytest.raises(ConversationError, match="cannot render") as caught:
        ChatEncoder(tokenizer).encode([{"role": "user", "content": "x"}], tools)
    assert caught.value.reason == "not_rendered"


def test_settings_for_batches_are_not_taken_over(tokenizer: Tokenizer) -> None:
    changed = Tokenizer.from_str(tokenizer.to_str())
    changed.enable_truncation(4)
    changed.enable_padding(length=500)
    messages = [{"role": "user", "content": "how warm is it"}]
    assert (
        ChatEncoder(changed).encode(messages).tokens.tolist()
        == ChatEncoder(tokenizer).encode(messages).tokens.tolist()
    )


def test_every_kind_of_tokenizer_gives_the_tokens_of_transformers_or_is_refused() -> None:
    texts = [
        "Hi there",
        " lead and trail  ",
        "\n\nnl\n",
        "\u0338x",
        "Éa\u0301 日本 1234",
        "a<b>c",
        "\u00a0 x\u3000",
    ]
    conversations = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}] * 2
        for one, other in itertools.pairwise([*texts, texts[0]])
    ]
    for kind in kinds():
        made = make(**kind)
        try:
            encoder = ChatEncoder(made)
        except ChatError as error:
            assert any(f"states {option}" in str(error) and kind[option] for option in OPTIONS)
            continue
        assert not (kind["lstrip"] or kind["rstrip"] or kind["single_word"])
        assert not kind["normalized"] or "normalizer" not in kind
        theirs = PreTrainedTokenizerFast(tokenizer_object=made)
        for messages in conversations:
            rendered = theirs(render(messages), add_special_tokens=False)["input_ids"]
            assert encoder.encode(messages).tokens.tolist() == rendered, kind
            prompt, answer = encoder.prompt(messages[:-1]), encoder.completion(messages[-1]["content"])
            assert [*prompt, *answer] == rendered, kind


def test_these_kinds_are_all_that_the_library_has() -> None:
    def parts(module: Any, base: type) -> set[str]:
        found = {
            name for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, base)
        }
        return found - {base.__name__}

    assert parts(normalizers, normalizers.Normalizer) == {*NORMALIZERS, "Precompiled"}
    assert parts(pre_tokenizers, pre_tokenizers.PreTokenizer) == set(PRE_TOKENIZERS)
    assert parts(models, models.Model) == set(MODELS)
    stated = json.loads(make().to_str())["added_tokens"][0]
    assert set(stated) - {"id", "content", "special"} == set(OPTIONS)
