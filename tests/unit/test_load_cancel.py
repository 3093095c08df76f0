"""Which requests a client cancels, and when it has had enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.schema import DeviceKind
from serving.load.cancel import Enough, cancelled_places
from serving.load.http1 import ResponseParser
from serving.load.prompts import CallSpec, build_requests
from sweeps.call import call_spec, prompt_problems
from sweeps.plan import plan
from sweeps.trial import ServingTrial

SPEC = CallSpec("m", "completions", 8, 16, 1000, draw="0/cell/r0", cancel_share=0.25,
                cancel_after_tokens=8)  # fmt: skip
CELL = ["+exp=quickstart", "measure=[serving]", "load.shapes=[64/16]", "load.cancel_share=0.25"]
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def chosen(spec: CallSpec, trial_id: str = "t", **counts: int) -> list[int]:
    """Places of the cancelled requests among the measured ones."""
    asked = {"measured": 40, "warmups": 4, "calibration": 1} | counts
    requests = build_requests(spec, seed=0, trial_id=trial_id, **asked)
    others = [r for r in requests if r.role != "measured"]
    assert {r.cancel_after_tokens for r in others} <= {None}
    measured = [r.cancel_after_tokens for r in requests if r.role == "measured"]
    assert set(measured) <= {None, spec.cancel_after_tokens}
    return [place for place, after in enumerate(measured) if after is not None]


def test_a_share_of_the_measured_requests_is_chosen_by_the_draw_alone():
    found = chosen(SPEC)
    assert len(found) == 10
    assert chosen(SPEC, "another arm", warmups=0, calibration=0) == found
    assert chosen(replace(SPEC, draw="0/cell/r1")) != found
    assert chosen(replace(SPEC, draw="1/cell/r0")) != found


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.001, 1), (0.26, 10), (0.99, 40), (1.0, 40)]
)
def test_the_share_is_rounded_to_whole_requests_and_never_to_none(share, count):
    assert len(chosen(replace(SPEC, cancel_share=share))) == count


def test_only_requests_that_ask_for_more_tokens_are_chosen():
    lengths = [8, 9, 4, 100, 8, 9]
    assert cancelled_places(lengths, 0.5, 8, "key") == {1, 3, 5}
    with pytest.raises(ValueError, match=r"`load.cancel_share=0.6` is 4 of 6 requests, and 3 of"):
        cancelled_places(lengths, 0.6, 8, "key")


def test_arms_of_a_cell_and_repeat_cancel_the_same():
    (config,) = compose_all([*CELL, "repeats=2", "load.concurrency=[4]"], multirun=False)
    found: dict[int, list[list[int]]] = {}
    for trial in plan(config, DeviceKind.cpu):
        assert isinstance(trial, ServingTrial)
        places = chosen(call_spec(config, trial, "m", 1000), trial.trial_id, measured=12)
        found.setdefault(trial.repeat, []).append(places)
    assert [len(places) for places in found[0]] == [3, 3], "two arms"
    assert found[0][0] == found[0][1]
    assert found[1][0] == found[1][1] != found[0][0]


def test_a_file_with_too_few_long_replies_is_found_out_before_anything_starts(tmp_path: Path):
    file = tmp_path / "talks.json"
    turns = '[{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "%s"}]'
    talks = [f'{{"conversations": {turns % ("word " * n)}}}' for n in (1, 1, 1, 60)]
    file.write_text(f"[{', '.join(talks)}]")
    asked = ["load.shapes=[file/file]", "load.prompts=conversations", f"load.file={file}"]
    for share, problems in (("0.25", 0), ("0.5", 1)):
        overrides = [CELL[0], CELL[1], *asked, f"load.cancel_share={share}"]
        (config,) = compose_all([*overrides, "load.concurrency=[1]"], multirun=False)
        found = list(prompt_problems(config, plan(config, DeviceKind.cpu)))
        assert len(found) == problems, found
    assert "`load.cancel_share=0.5` is 4 of 8 requests, and 2 of them ask for more" in found[0]


def event(text: str) -> bytes:
    return f'data: {{"choices": [{{"text": "{text}", "finish_reason": null}}]}}\n\n'.encode()


@pytest.mark.parametrize("size", [1, 5, 64, 10_000])
def test_tokens_are_counted_however_the_bytes_are_split(size):
    events = [event("a"), b": comment\n\n", event(""), event("b"), event("c"), event("d")]
    data = HEAD + b"".join(events)
    enough_at = len(HEAD) + sum(map(len, events[:5]))
    response, enough = ResponseParser(), Enough(3)
    for at in range(0, len(data), size):
        response.feed(data[at : at + size])
        assert enough(response) is (min(at + size, len(data)) >= enough_at)


def test_usage_that_runs_along_decides_before_text_does():
    usage = '"usage": {"prompt_tokens": 3, "completion_tokens": 5}'
    data = f'data: {{"choices": [{{"text": ""}}], {usage}}}\n\n'.encode()
    response = ResponseParser()
    response.feed(HEAD + data)
    assert Enough(5)(response)
    assert not Enough(6)(response)


def test_an_error_page_holds_no_tokens():
    response = ResponseParser()
    response.feed(b"HTTP/1.1 500 Oops\r\n\r\n" + event("a"))
    assert not Enough(1)(response)
