"""Files of prompts: what is read, what is refused and where, and what a cell sends of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ep_ray.config.schema import Model
from serving.load.file_drafts import conversation_drafts, fitting
from serving.load.prompt_file import Conversation, PromptFile, read_prompt_file
from serving.load.prompts import CallSpec, build_requests
from serving.models import tokenizer_file


def talk(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


TALKS = [
    talk(
        ("system", "be kind"), ("human", " What is it? "), ("gpt", "It is a cat."), ("human", "a")
    ),
    talk(("gpt", "Go on"), ("user", "Über"), ("assistant", "Yes"), ("human", "b"), ("gpt", "c")),
    talk(("human", "nobody replies")),
    talk(("human", "twice"), ("human", "asked"), ("gpt", "ok")),
    talk(("human", "empty"), ("gpt", "  ")),
    talk(),
]


def read(folder: Path, text: str, kind: str = "conversations") -> PromptFile:
    path = folder / "prompts.json"
    path.write_text(text, encoding="utf-8")
    return read_prompt_file(kind, str(path))


def file_of(count: int) -> PromptFile:
    talks = tuple(Conversation(f"question {i}", 3, 10 + i) for i in range(count))
    return PromptFile("f", "d", talks)


def test_the_first_question_that_is_replied_to_is_taken(tmp_path):
    text = json.dumps(TALKS, ensure_ascii=False, indent=1)
    found = read(tmp_path, text)
    assert found.conversations == (Conversation("What is it?", 3, 3), Conversation("Über", 2, 1))
    assert found.digest == hashlib.sha256(text.encode()).hexdigest()
    assert read(tmp_path, json.dumps(TALKS)).conversations == found.conversations


def test_the_models_tokenizer_counts_and_leaves_room_for_the_marker(tmp_path):
    # The made tokenizer takes each byte for a token.
    tokenizer = tokenizer_file(Model(name="m", made="tiny"), tmp_path)
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(TALKS), encoding="utf-8")
    found = read_prompt_file("conversations", str(path), tokenizer)
    assert [(c.prompt_tokens, c.completion_tokens) for c in found.conversations] == [
        (len("What is it?") + 17, len("It is a cat.")), (len("Über".encode()) + 17, len("Yes")),
    ]  # fmt: skip
    # 11 + 17 + 12 tokens fit into 40 and not into 39.
    first = found.conversations[0]
    assert first in fitting(found, None, 40)
    assert first not in fitting(found, None, 39)


def test_a_marker_is_never_more_than_the_tokens_left_for_it(tmp_path):
    file = tokenizer_file(Model(name="m", made="tiny"), tmp_path)
    (draft,) = conversation_drafts([Conversation("ask", 3, 1)], "d", ["measured"], ["k"], None)
    assert len(Tokenizer.from_file(file).encode(draft.prompt).ids) == 3 + 17


def test_a_model_without_a_tokenizer_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_file(Model(name="m", path=str(tmp_path)), tmp_path) is None
    assert tokenizer_file(Model(name="m", path="./nowhere"), tmp_path) is None
    assert tokenizer_file(Model(name="m"), tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = tokenizer_file(Model(name="m", path=str(tmp_path)), tmp_path)
    assert broken == str(tmp_path / "tokenizer.json")
    talks = tmp_path / "talks.json"
    talks.write_text(json.dumps(TALKS))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        read_prompt_file("conversations", str(talks), broken)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: found no `\\[`"),
        ('{"conversations": []}', "line 1: found no `\\[`"),
        ("[]", "no conversation in which a human asks"),
        ("[{},\n 1]", 'line 1: asked an object with "conversations"'),
        ('[{"conversations": []},\n\n 1]', "line 3: asked an object with"),
        ('[\n{"conversations": [{"from": "human"}]}]', 'line 2: asked turns {"from"'),
        ('[{"conversations": []}\n{"conversations": []}]', "line 2: no `,` or `\\]` after"),
        ('[{"conversations": []},\n{"conversations": oh}]', "line 2: no JSON: Expecting value"),
        ('[{"conversations": []},\n', "line 2: no JSON"),
        ('[{"conversations": []}', "line 1: no `,` or `\\]` after"),
    ],
)
def test_what_is_not_in_the_format_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`load\.file=.*none`: no such file"):
        read_prompt_file("conversations", str(tmp_path / "none"))
    path = tmp_path / "prompts.json"
    path.write_bytes(b"[\n\xff]")
    with pytest.raises(ValueError, match="line 2: no UTF-8"):
        read_prompt_file("conversations", str(path))


def sent(spec: CallSpec, trial_id: str = "t", **counts: int) -> list[tuple[str, str, str, int]]:
    """Role, marker, question and asked length of each request."""
    found = []
    for request in build_requests(spec, seed=0, trial_id=trial_id, **counts):
        body = json.loads(request.body)
        assert body["max_tokens"] == body["min_tokens"] == request.max_tokens
        first, _, question = body["messages"][0]["content"].partition(" ")
        found.append((request.role, first, question, request.max_tokens))
    return found


def call(count: int, completion: int | None = None, **more: object) -> CallSpec:
    kind = {"prompts": "conversations", "file": file_of(count), "draw": "cell/r0"}
    return CallSpec("m", "chat", None, completion, **(kind | more))  # type: ignore[arg-type]


def test_arms_send_the_same_measured_conversations_behind_markers_of_their_own():
    first = sent(call(20), "a", measured=8, warmups=2, calibration=1)
    other = sent(call(20), "b", measured=8, warmups=2)
    questions = [[q for role, _, q, _ in side if role == "measured"] for side in (first, other)]
    assert questions[0] == questions[1]
    assert len({q for _, _, q, _ in first}) == 11, "no conversation twice while there are more"
    markers = [marker for _, marker, _, _ in first + other]
    assert len(set(markers)) == len(markers)
    third = sent(call(20, draw="cell/r1"), measured=8)
    assert [q for _, _, q, _ in third] != questions[0]


def test_completions_are_as_long_as_the_replies_or_as_asked():
    for _, _, question, length in sent(call(5), measured=5):
        assert length == 10 + int(question.split()[1])
    assert {length for *_, length in sent(call(5, 7), measured=5)} == {7}


def test_more_requests_than_conversations_begin_anew_with_other_markers():
    found = sent(call(3), measured=7)
    assert len({marker for _, marker, _, _ in found}) == 7
    assert {q for _, _, q, _ in found} == {"question 0", "question 1", "question 2"}


def test_what_a_model_cannot_hold_is_left_out_and_nothing_at_all_refused():
    assert {q for _, _, q, _ in sent(call(5, max_model_len=14), measured=9)} == {
        "question 0",
        "question 1",
    }
    with pytest.raises(ValueError, match=r"none of its 5 conversations fits into model\.max_model"):
        sent(call(5, max_model_len=12), measured=1)


def test_a_kind_that_reads_no_file_is_not_read(tmp_path):
    with pytest.raises(ValueError, match="'text' come from no file"):
        read_prompt_file("text", str(tmp_path))
