"""Getting to know a server that is already running, over real sockets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ep_ray.config.compose import compose_all
from ep_ray.config.errors import ConfigError
from ep_ray.config.schema import DeviceKind
from ep_ray.watchdog import TrialError
from serving.attached import AttachedServer, AttachError, attach
from sweeps.attached_host import AttachedHost
from sweeps.feasible import check_feasible
from sweeps.plan import plan
from sweeps.trial import ServingTrial
from tests.serving.openai_server import Habits, openai_server

VOCABULARY = 1000


def test_the_only_model_is_taken_and_ids_are_sent_where_the_vocabulary_is_known():
    habits = Habits()
    with openai_server(habits) as url:
        assert attach(url, "completions", "", VOCABULARY) == AttachedServer("m", True, False, "9.9")
    (body,) = habits.bodies
    assert (body["model"], body["stream"], body["ignore_eos"]) == ("m", True, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len(body["prompt"]) == 2
    assert all(0 <= token < VOCABULARY for token in body["prompt"])


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_as_people_write_it(suffix):
    with openai_server(Habits()) as url:
        assert attach(url + suffix, "chat", "m", None).model == "m"


def test_without_a_vocabulary_prompts_are_text():
    habits = Habits(version=None)
    with openai_server(habits) as url:
        assert attach(url, "completions", "", None) == AttachedServer("m", False, False, "")
    assert isinstance(habits.bodies[0]["prompt"], str)


def test_a_server_that_refuses_token_ids_gets_text():
    with openai_server(Habits(token_ids=False)) as url:
        assert attach(url, "completions", "", VOCABULARY) == AttachedServer(
            "m", False, False, "9.9"
        )


def test_a_strict_server_gets_standard_fields_only():
    habits = Habits(strict=True)
    with openai_server(habits) as url:
        assert attach(url, "completions", "", VOCABULARY) == AttachedServer("m", True, True, "9.9")
    assert set(habits.bodies[-1]) == {
        "model", "prompt", "max_tokens", "temperature", "stream", "stream_options",
    }  # fmt: skip


def test_a_strict_server_that_refuses_token_ids_too():
    with openai_server(Habits(strict=True, token_ids=False)) as url:
        assert attach(url, "completions", "", VOCABULARY) == AttachedServer("m", False, True, "9.9")


@pytest.mark.parametrize(
    ("models", "asked", "says"),
    [
        (("a", "b"), "", "asked: no model.name; found: {url} offers a, b. Choose one"),
        (("a", "b"), "c", "asked: model.name=c; found: {url} offers a, b. Choose one"),
        (("a",), "c", "asked: model.name=c; found: {url} offers a. Choose one"),
        ((), "", "asked: no model.name; found: {url} offers no model."),
    ],
)
def test_a_model_that_cannot_be_chosen_lists_what_there_is(models, asked, says):
    habits = Habits(models=models)
    with openai_server(habits) as url:
        with pytest.raises(AttachError) as caught:
            attach(url, "completions", asked, None)
    assert says.format(url=url) in str(caught.value)
    assert habits.bodies == [], "load was sent to a model that nobody chose"


def test_one_of_several_models():
    with openai_server(Habits(models=("a", "b"))) as url:
        assert attach(url, "completions", "b", None).model == "b"


def test_a_server_that_takes_no_request_says_what_it_answers():
    with openai_server(Habits(chat_only=True)) as url:
        with pytest.raises(AttachError) as caught:
            attach(url, "completions", "", VOCABULARY)
        assert attach(url, "chat", "", VOCABULARY) == AttachedServer("m", False, False, "9.9")
    message = str(caught.value)
    assert f"{url}/v1/completions takes no request for model `m`" in message
    assert "no such endpoint" in message
    assert "load.api=chat" in message


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refused(*overrides: str) -> str:
    (config,) = compose_all(["+exp=attached", *overrides], multirun=False)
    with pytest.raises(ConfigError) as caught:
        check_feasible(config, plan(config, DeviceKind.cpu), DeviceKind.cpu, [], {})
    return str(caught.value)


def test_no_server_is_found_out_before_anything_starts():
    url = f"http://127.0.0.1:{free_port()}"
    message = refused(f"arm.url={url}")
    assert f"{url}/v1/models does not answer as an OpenAI-compatible server does" in message
    assert "Start the server, or correct arm.url=" in message


def test_something_else_that_speaks_http():
    with openai_server(Habits()) as url:
        message = refused(f"arm.url={url}/rank0/metrics")
    assert "does not answer as an OpenAI-compatible server does" in message


def test_rank_urls_without_counters_are_found_out_before_anything_starts():
    with openai_server(Habits()) as url:
        message = refused(f"arm.url={url}", f"arm.rank_urls=[{url}/rank0,{url}/elsewhere]")
    assert f"asked: the counters of rank {url}/elsewhere (arm.rank_urls)" in message
    assert "HTTP Error 404" in message
    assert f"rank {url}/rank0 " not in message


def host(*overrides: str) -> tuple[AttachedHost, ServingTrial]:
    (config,) = compose_all(["+exp=attached", *overrides], multirun=False)
    trial = plan(config, DeviceKind.cpu)[0]
    assert isinstance(trial, ServingTrial)
    return AttachedHost(config, trial, {trial.router}, Path("never-written")), trial


def test_counters_of_ranks_whose_urls_are_given():
    habits = Habits(ranks=2)
    with openai_server(habits) as url:
        arm, trial = host(f"arm.url={url}", f"arm.rank_urls=[{url}/rank0,{url}/rank1/]")
        assert arm.endpoints() == [f"{url}/rank0", f"{url}/rank1/"]
        for _ in range(3):
            arm.look()
        counts = arm.counts(trial)
    assert counts.router is None
    assert counts.engines is not None
    assert [engine.complete for engine in counts.engines.values()] == [2, 1]


def test_counters_that_cannot_be_read_fail_the_trial():
    with openai_server(Habits()) as url:
        arm, trial = host(f"arm.url={url}", f"arm.rank_urls=[{url}/elsewhere]")
        with pytest.raises(TrialError, match=r"counters of rank .*/elsewhere"):
            arm.counts(trial)


def test_without_rank_urls_nothing_is_counted_or_claimed():
    with openai_server(Habits()) as url:
        arm, trial = host(f"arm.url={url}")
        assert (arm.counts(trial).router, arm.counts(trial).engines, arm.evidence()) == (
            None,
            None,
            [],
        )
        assert arm.endpoints() == [url]


def test_a_server_that_went_away_fails_the_trial():
    arm, _ = host(f"arm.url=http://127.0.0.1:{free_port()}")
    with pytest.raises(TrialError) as caught:
        arm.start()
    assert caught.value.status == "failed"
