"""Conversations: which tokens are learned, and how they share samples."""

import json
import os
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.lm.batch import IGNORED, Batch
from paceline.lm.chat import ChatFormat, chat_rows, messages_of
from paceline.lm.chat_samples import FirstFit, open_chat, prepare_chat
from paceline.lm.evaluate import summed_loss
from paceline.lm.files import Damaged
from paceline.lm.gpt import GPT, GPTShape
from paceline.lm.manifest import write_manifest
from paceline.lm.pretrained import Pretrained, load_pretrained

pytestmark = pytest.mark.slow

# As it comes with SmolLM2-135M-Instruct.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Written for these tests; they do with plain conversations what the models' own templates do. Qwen3 shows
# thoughts in the last answer only, and an empty thought if it has none.
QWEN3 = """
{%- set last = namespace(question=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {%- set thought = parts[0].split('<think>')[-1] if parts | length > 1 else '' %}
        {%- set words = parts[-1].lstrip('\n') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.question and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- words + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# Gemma has no system role: its words go before the first question.
GEMMA3 = """
{{- bos_token }}
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if first else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {{- (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

SPECIAL = ["<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
TEXT = (
    "system user assistant model think You are a helpful AI assistant named SmolLM, trained by Hugging Face "
    "Be brief\n\nWhat is it? It is a cat. And that? A dog\n\nHmm\nFirst question Second answer"
)


def make_tokenizer(template):
    """Words are tokens, with a space before them or without, and so is any number of new lines."""
    tokenizer = Tokenizer(models.BPE())
    words = Split(Regex(r"\n+| ?[^\s?.,]+| ?[?.,]|\s"), "isolated")
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, "\n".join(TEXT.split()), "\n\n"] * 3, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(SMOLLM2)


def chat(*contents, system=None):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}] * (system is not None) + messages


def shown(form, tokenizer, messages):
    """The tokens of a conversation, ⏎ for a new line, those learned in brackets."""
    example = form.tokenize([form.render(messages)])[0]
    words = [tokenizer.decode([token]).replace("\n", "⏎") for token in example.tokens]
    marked = [f"[{word}]" if learned else word for word, learned in zip(words, example.learned, strict=True)]
    return "·".join(marked)


# --- Which tokens are learned ---------------------------------------------------------------------

EXPECTED = {
    "smollm2, two turns": (
        SMOLLM2,
        chat("What is it?", "It is a cat.", "And that?", "A dog"),
        "<|im_start|>·system·⏎·You· are· a· helpful· AI· assistant· named· SmolLM·,· trained· by· Hugging"
        "· Face·<|im_end|>·⏎·<|im_start|>·user·⏎·What· is· it·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[It]·[ is]·[ a]·[ cat]·[.]·[<|im_end|>]·⏎"
        "·<|im_start|>·user·⏎·And· that·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[A]·[ dog]·[<|im_end|>]·⏎",
    ),
    "smollm2, with system, ending with a question": (
        SMOLLM2,
        chat("What is it?", "A dog", "And that?", system="Be brief"),
        "<|im_start|>·system·⏎·Be· brief·<|im_end|>·⏎·<|im_start|>·user·⏎·What· is· it·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[A]·[ dog]·[<|im_end|>]·⏎·<|im_start|>·user·⏎·And· that·?·<|im_end|>·⏎",
    ),
    "qwen3, the last answer gets an empty thought": (
        QWEN3,
        chat("What is it?", "It is a cat.", "And that?", "A dog"),
        "<|im_start|>·user·⏎·What· is· it·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[It]·[ is]·[ a]·[ cat]·[.]·[<|im_end|>]·⏎"
        "·<|im_start|>·user·⏎·And· that·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[<think>]·[⏎⏎]·[</think>]·[⏎⏎]·[A]·[ dog]·[<|im_end|>]·⏎",
    ),
    "qwen3, thoughts of earlier answers are gone": (
        QWEN3,
        chat(
            "What is it?", "<think>\nHmm\n</think>\n\nA cat.", "And that?", "<think>\nHmm\n</think>\n\nA dog"
        ),
        "<|im_start|>·user·⏎·What· is· it·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[A]·[ cat]·[.]·[<|im_end|>]·⏎"
        "·<|im_start|>·user·⏎·And· that·?·<|im_end|>·⏎"
        "·<|im_start|>·assistant·⏎·[<think>]·[⏎]·[Hmm]·[⏎]·[</think>]·[⏎⏎]·[A]·[ dog]·[<|im_end|>]·⏎",
    ),
    "gemma3, two turns, spaces trimmed": (
        GEMMA3,
        chat("What is it?", " It is a cat. ", "And that?", "A dog"),
        "<bos>·<start_of_turn>·user·⏎·What· is· it·?·<end_of_turn>·⏎"
        "·<start_of_turn>·model·⏎·[It]·[ is]·[ a]·[ cat]·[.]·[<end_of_turn>]·⏎"
        "·<start_of_turn>·user·⏎·And· that·?·<end_of_turn>·⏎"
        "·<start_of_turn>·model·⏎·[A]·[ dog]·[<end_of_turn>]·⏎",
    ),
    "gemma3, with system": (
        GEMMA3,
        chat("What is it?", "A dog", system="Be brief"),
        "<bos>·<start_of_turn>·user·⏎·Be· brief·⏎⏎·What· is· it·?·<end_of_turn>·⏎"
        "·<start_of_turn>·model·⏎·[A]·[ dog]·[<end_of_turn>]·⏎",
    ),
}


@pytest.mark.parametrize(("template", "messages", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_the_assistants_tokens_are_learned_and_no_others(template, messages, expected):
    tokenizer = make_tokenizer(template)
    assert shown(ChatFormat(tokenizer), tokenizer, messages) == expected


@pytest.mark.parametrize(("template", "messages", "_"), EXPECTED.values(), ids=EXPECTED)
def test_tokens_are_those_of_transformers_and_of_the_parts(template, messages, _):
    """The whole as apply_chat_template gives it; what the model is asked with is how it begins."""
    tokenizer = make_tokenizer(template)
    form = ChatFormat(tokenizer)
    example = form.tokenize([form.render(messages)])[0]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert example.tokens.tolist() == whole
    assert example.merged == 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = tokenizer.apply_chat_template(
                messages[:number], add_generation_prompt=True, return_dict=False
            )
            assert whole[: len(asked)] == asked
            assert not example.learned[len(asked) - 1] and example.learned[len(asked)]


def test_a_template_can_be_given():
    tokenizer = make_tokenizer(None)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        ChatFormat(tokenizer)
    tokenizer.chat_template = GEMMA3
    assert ChatFormat(tokenizer).end_of_turn == "<end_of_turn>"


def test_a_token_that_joins_header_and_answer_is_not_learned():
    """Here an empty line is one token: the model, asked, is given ⏎ and can only add another."""
    tokenizer = make_tokenizer(SMOLLM2)
    form = ChatFormat(tokenizer)
    assert shown(form, tokenizer, chat("What is it?", "\nA dog")).endswith(
        "assistant·⏎⏎·[A]·[ dog]·[<|im_end|>]·⏎"
    )
    assert form.tokenize([form.render(chat("What is it?", "\nA dog"))])[0].merged == 1


def test_characters_of_several_tokens(tokenizer):
    form = ChatFormat(tokenizer)
    example = form.tokenize([form.render(chat("é…", "猫 é"))])[0]
    assert tokenizer.decode(example.tokens[example.learned]) == "猫 é<|im_end|>"
    assert example.merged == 0


NO_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_template_without_a_token_that_ends_a_turn():
    tokenizer = make_tokenizer(NO_END)
    form = ChatFormat(tokenizer)
    text, spans = form.render(chat("What is it?", "A cat.", "And that?", "A dog"))
    assert [text[start:end] for start, end in spans] == ["A cat.\n", "A dog\n"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # without a generation prompt the header would be learned
        (SMOLLM2.partition("{% if add_generation_prompt")[0], "cannot be found with this chat template"),
        # only the last turn has an end
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% elif messages | length > 1 %}<|im_end|>{% endif %}",
            "cannot be found with this chat template",
        ),
        # counts the messages at the beginning
        ("{{ messages | length }}" + SMOLLM2, "writes the first 1 messages alone differently"),
        ("{% for message in messages %}{{ message['content'] }}", "the chat template fails: .*endfor"),
        ("{{ raise_exception('not today') }}", "the chat template fails: not today"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: .*unsafe"),
        ("Hello", "cannot be found with this chat template"),
    ],
)
def test_a_template_that_cannot_be_used(template, message):
    with pytest.raises(ValueError, match=message):
        ChatFormat(make_tokenizer(template))


@pytest.mark.slow
@pytest.mark.skipif("PACELINE_SMOLLM2" not in os.environ, reason="PACELINE_SMOLLM2 names no folder")
def test_smollm2_itself():
    _, tokenizer = load_pretrained(os.environ["PACELINE_SMOLLM2"])
    assert tokenizer.chat_template == SMOLLM2
    assert shown(ChatFormat(tokenizer), tokenizer, chat("What is it?", "It is a cat.")) == (
        "<|im_start|>·system·⏎·You· are· a· helpful· AI· assistant· named· Sm·ol·LM·,· trained· by· H·ugging"
        "· Face·<|im_end|>·⏎·<|im_start|>·user·⏎·What· is· it·?·<|im_end|>·⏎"
        "·<|im_start|>·ass·istant·⏎·[It]·[ is]·[ a]·[ cat]·[.]·[<|im_end|>]·⏎"
    )


# --- Rows -----------------------------------------------------------------------------------------

GOOD = {"messages": chat("What is it?", "A dog"), "source": "here"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Hi"}, "no list of messages under 'messages'; it has text"),
        ({}, "it has nothing"),
        ({"messages": []}, "no list of messages"),
        ({"messages": "Hi"}, "no list of messages"),
        ({"messages": ["Hi"]}, "message 1: role 'Hi'; allowed: system, user, assistant"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "message 1: role 'wizard'; allowed"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, r"message 1: role \['user'\]; allowed"),
        ({"messages": [{"content": "Hi"}]}, "message 1: role None"),
        (
            {"messages": [*chat("Hi"), {"role": "assistant"}]},
            "message 2: its content must be text, not NoneType",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "must be text, not list"),
        ({"messages": chat("Hi", " ")}, "message 2: the assistant's answer is empty"),
        ({"messages": chat("Hi", "A dog")[1:]}, "message 1: the assistant's answer comes first"),
        ({"messages": chat("\ud800", "A dog")}, "'utf-8' codec can't encode character"),
    ],
)
def test_a_broken_row_is_named(tmp_path, tokenizer, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [GOOD, GOOD, row])))
    with pytest.raises(ValueError, match=f"rows.jsonl, line 3.*{message}"):
        prepare_chat(chat_rows(path), ChatFormat(tokenizer), tmp_path / "out", source={}, length=64)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_row_the_template_refuses_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [GOOD, {"messages": chat("Hi", "A dog") + chat("Hi", "A dog")[1:]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        ValueError, match=r"rows.jsonl, line 2: the chat template fails: Conversation roles must"
    ):
        prepare_chat(
            chat_rows(path), ChatFormat(make_tokenizer(GEMMA3)), tmp_path / "out", source={}, length=64
        )


def test_other_fields_of_a_message_are_left_out():
    row = {"messages": [{"role": "user", "content": "Hi", "name": "Eve"}]}
    assert messages_of(row, "here") == [{"role": "user", "content": "Hi"}]


# --- Packing --------------------------------------------------------------------------------------


def test_first_fit_is_first_fit():
    noise = random.Random(0)
    for length in (1, 7, 100):
        sizes = [noise.randint(1, length) for _ in range(500)]
        pack, rooms = FirstFit(length), []
        for size in sizes:
            sample = next((i for i, room in enumerate(rooms) if room >= size), len(rooms))
            if sample == len(rooms):
                rooms.append(length)
            assert pack.place(size) == (sample, length - rooms[sample])
            rooms[sample] -= size
        assert pack.samples == len(rooms)


def rows_of(*conversations):
    return [(f"row {i}", {"messages": messages}) for i, messages in enumerate(conversations)]


def test_samples_by_hand(tmp_path):
    """Three conversations in two samples of 12: the third fits behind the first."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    rows = rows_of(
        chat("It", "A cat."),  # <s> It <e> <s> [A] [ cat] [.] [<e>]
        chat("And that?", "A dog"),  # <s> And  that ? <e> <s> [A] [ dog] [<e>]
        chat("What", "A"),  # <s> What <e> <s> [A] [<e>]
    )
    samples = prepare_chat(rows, ChatFormat(tokenizer), tmp_path / "out", source={}, length=15)
    tokens, targets, positions = samples.batch([0, 1])
    s, e = "<|im_start|>", "<|im_end|>"

    def words(row):
        return [".." if i == IGNORED else tokenizer.decode([i]) for i in row]

    pad = tokenizer.decode([0])
    assert words(tokens[0]) == [s, "It", e, s, "A", " cat", ".", e, s, "What", e, s, "A", e, pad]
    learned = ["A", " cat", ".", e]
    assert words(targets[0]) == [*[".."] * 3, *learned, *[".."] * 4, "A", e, "..", ".."]
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 0]
    assert words(tokens[1]) == [s, "And", " that", "?", e, s, "A", " dog", e] + [pad] * 6
    assert words(targets[1]) == [".."] * 5 + ["A", " dog", e] + [".."] * 7
    assert positions[1].tolist() == [*range(9), 0, 0, 0, 0, 0, 0]
    report = samples.report
    assert (report.conversations, report.samples, report.tokens, report.loss_tokens) == (3, 2, 23, 9)
    assert report.loss_tokens == samples.batch([0, 1]).target_count()
    assert report.places == 30
    assert len(samples) == 2 and samples.length == 15
    assert torch.equal(samples.batch(np.array([1, 0])).tokens, tokens.flip(0))
    with pytest.raises(IndexError, match="sample 0 or 2; allowed: 0 to 1"):
        samples.batch([0, 2])


def test_what_is_left_out_and_cut_off_is_counted(tmp_path, tokenizer):
    rows = rows_of(
        chat("What is it?"),  # no answer
        chat("What is it?", "A <|im_end|> dog"),  # a token of the template's in the text
        chat("What is it? " * 20, "A dog"),  # the answer is beyond the length
        chat("What is it?", "A dog " * 20, system="Be brief"),  # 16 tokens before the answer, of 41 + 3
        chat("What is it?", "A dog", system="Be brief"),
    )
    samples = prepare_chat(rows, ChatFormat(tokenizer), tmp_path / "out", source={}, length=32)
    report = samples.report
    assert (report.conversations, report.unanswered, report.control, report.beyond) == (5, 1, 1, 1)
    whole = [len(tokenizer.apply_chat_template(row["messages"], return_dict=False)) for _, row in rows[3:]]
    assert (report.truncated, report.tokens_cut) == (1, whole[0] - 32)
    assert (report.samples, report.tokens) == (2, 32 + whole[1])
    cut, targets, _ = samples.batch([0])
    assert cut[0].tolist() == tokenizer.apply_chat_template(rows[3][1]["messages"], return_dict=False)[:32]
    assert targets[0, -1] == IGNORED and targets[0, -2] == cut[0, -1]


def test_nothing_to_learn_is_an_error(tmp_path, tokenizer):
    form = ChatFormat(tokenizer)
    with pytest.raises(ValueError, match="nothing to learn: 1 conversations, 1 unanswered"):
        prepare_chat(rows_of(chat("Hi")), form, tmp_path / "out", source={}, length=32)
    with pytest.raises(ValueError, match="nothing to learn"):
        prepare_chat([], form, tmp_path / "out", source={}, length=32)
    with pytest.raises(ValueError, match="Invalid length of a sample: 1"):
        prepare_chat([], form, tmp_path / "out", source={}, length=1)


def many(count=40, seed=0):
    noise = random.Random(seed)
    words = TEXT.replace("\n", " ").split()

    def text():
        return " ".join(noise.choices(words, k=noise.randint(1, 8)))

    return rows_of(*(chat(*(text() for _ in range(2 * noise.randint(1, 3)))) for _ in range(count)))


def test_every_conversation_is_there_once(tmp_path, tokenizer):
    rows, form = many(), ChatFormat(tokenizer)
    samples = prepare_chat(rows, form, tmp_path / "out", source={}, length=128)
    tokens, targets, positions = samples.batch(range(len(samples)))
    found = []
    for row in range(len(samples)):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), samples.length]
        for start, end in pairwise(starts):
            assert positions[row, start:end].tolist() == list(range(end - start))
            if end - start > 1:
                found.append((tokens[row, start:end].tolist(), targets[row, start:end].tolist()))
    expected = []
    for example in form.tokenize([form.render(row["messages"]) for _, row in rows]):
        learned = [t if w else IGNORED for t, w in zip(example.tokens.tolist(), example.learned, strict=True)]
        expected.append((example.tokens.tolist(), [*learned[1:], IGNORED]))
    assert sorted(found) == sorted(expected)


MODELS = ("gpt", "llama", "qwen3", "gemma3_text")


def make_model(kind, vocabulary):
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(GPTShape(vocabulary=vocabulary, length=128, width=32, layers=2, heads=4)).eval()
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
        if "gemma" in kind
        else {},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    )
    return Pretrained(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.parametrize("kind", MODELS)
def test_packed_losses_are_those_of_conversations_alone(tmp_path, tokenizer, kind):
    samples = prepare_chat(many(), ChatFormat(tokenizer), tmp_path / "out", source={}, length=128)
    model = make_model(kind, samples.vocabulary)
    batch = samples.batch(range(4))
    with torch.no_grad():
        packed = summed_loss(model, batch).item()
        alone = 0.0
        for tokens, targets, positions in zip(*batch, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), samples.length]
            for start, end in pairwise(starts):
                if (targets[start:end] != IGNORED).any():
                    part = Batch(tokens[None, start:end], targets[None, start:end], None)
                    alone += summed_loss(model, part).item()
        leaked = summed_loss(model, Batch(batch.tokens, batch.targets, None)).item()
    assert packed == pytest.approx(alone, rel=1e-6)
    assert abs(leaked - alone) > 1e-5 * alone


# --- On disk --------------------------------------------------------------------------------------


def prepared(tmp_path, tokenizer, name="out", **changes):
    settings = {"source": {"rows": "many"}, "length": 64} | changes
    return prepare_chat(many(), ChatFormat(tokenizer), tmp_path / name, **settings)


def test_what_is_prepared_is_not_prepared_again(tmp_path, tokenizer):
    first = prepared(tmp_path, tokenizer)

    def unread():
        raise AssertionError("the rows were read")
        yield

    again = prepare_chat(
        unread(), ChatFormat(tokenizer), tmp_path / "out", source={"rows": "many"}, length=64
    )
    assert again.fingerprint == first.fingerprint and again.report == first.report
    for changes in ({"length": 65}, {"source": {"rows": "others"}}):
        with pytest.raises(ValueError, match=rf"prepared from something else; .*\({next(iter(changes))} "):
            prepared(tmp_path, tokenizer, **changes)
    with pytest.raises(ValueError, match=r"prepared from something else; .*\(chat_format "):
        prepared(tmp_path, make_tokenizer(QWEN3))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(ValueError, match=r"mine/manifest\.json is missing"):
        prepared(tmp_path, tokenizer, name="mine")


def test_the_same_rows_give_the_same_bytes(tmp_path, tokenizer):
    one, two = prepared(tmp_path, tokenizer, "one"), prepared(tmp_path, tokenizer, "two")
    assert one.fingerprint == two.fingerprint
    for name in ("manifest.json", "samples.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert prepared(tmp_path, tokenizer, "three", length=63).fingerprint != one.fingerprint


def test_progress_is_told(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("paceline.lm.chat_samples._BATCH", 16)
    told = []
    samples = prepared(tmp_path, tokenizer, progress=lambda *done: told.append(done))
    assert [conversations for conversations, _ in told] == [16, 32, 40]
    assert told[-1][1] == samples.report.tokens


def test_an_interrupted_preparation_leaves_nothing(tmp_path, tokenizer):
    def rows():
        yield from many(600)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_chat(rows(), ChatFormat(tokenizer), tmp_path / "out", source={}, length=64)
    assert not list(tmp_path.iterdir())


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << place % 8
    path.write_bytes(content)


def refused(folder, message):
    with pytest.raises(Damaged, match=message) as raised:
        open_chat(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["manifest.json", "samples.bin"])
def test_a_flipped_bit_is_found(tmp_path, tokenizer, name):
    prepared(tmp_path, tokenizer)
    folder = tmp_path / "out"
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), len(whole) // 60):
        (folder / "checked").unlink(missing_ok=True)
        flip(folder / name, place)
        refused(folder, f"{folder}/{name}|samples.bin is missing")
        (folder / name).write_bytes(whole)
    open_chat(folder)


@pytest.mark.parametrize("name", ["manifest.json", "samples.bin"])
def test_a_damaged_cache_is_named_and_prepared_again(tmp_path, tokenizer, name):
    whole = prepared(tmp_path, tokenizer)
    flip(tmp_path / "out" / name, 40)
    with pytest.raises(Damaged, match=name):
        prepared(tmp_path, tokenizer)
    told = []
    again = prepared(tmp_path, tokenizer, is_cache=True, tell=told.append)
    assert len(told) == 1 and name in told[0] and told[0].endswith("it is prepared again")
    assert (again.fingerprint, again.manifest) == (whole.fingerprint, whole.manifest)


def test_a_token_that_went_bad_after_opening_is_named(tmp_path, tokenizer):
    samples = prepared(tmp_path, tokenizer)
    for token in (2**20, -1):
        with (tmp_path / "out/samples.bin").open("r+b") as file:
            file.seek(4 * (3 * 64 + 2))
            file.write(token.to_bytes(4, "little", signed=True))
        message = rf"samples\.bin: token {token} in sample 1 at place 2; allowed: 0"
        with pytest.raises(ValueError, match=message):
            samples.batch([0, 1])


def test_a_file_of_another_size_or_kind(tmp_path, tokenizer):
    prepared(tmp_path, tokenizer)
    folder, path = tmp_path / "out", tmp_path / "out/samples.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    refused(folder, rf"samples\.bin has {size - 1} bytes; {size} were written")
    path.unlink()
    refused(folder, r"samples\.bin is missing")
    path.symlink_to("/etc/passwd")
    refused(folder, r"samples\.bin is not a regular file")


@pytest.mark.parametrize(
    "fields",
    [
        {"length": 65},
        {"length": None},
        {"report": {"samples": 1}},
        {"report": {"samples": -1}},
        {"files": {}},
        {"format": 1},
    ],
)
def test_a_manifest_with_a_wrong_value(tmp_path, tokenizer, fields):
    prepared(tmp_path, tokenizer)
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    write_manifest(path, manifest | fields)
    refused(tmp_path / "out", "manifest.json")
