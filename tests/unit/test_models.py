"""Making and resolving models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ep_ray.config.schema import Model
from serving import models
from serving.models import ModelError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def tiny(**changes: object) -> Model:
    return replace(Model(name="tiny", made="tiny", load_format="dummy"), **changes)  # type: ignore[arg-type]


def test_tiny_is_resolved(cache: Path) -> None:
    found = models.resolve(tiny(), cache)
    assert (found.vocab_size, found.experts, found.special_ids) == (1024, 8, (0, 1, 2))
    assert found.revision.startswith("sha256:")
    assert found == models.resolve(tiny(), cache)


def test_lite_has_the_published_shape(cache: Path) -> None:
    found = models.resolve(tiny(made="lite"), cache)
    assert (found.vocab_size, found.experts) == (102400, 64)
    assert {0, 1, 2, 100000, 100001} == set(found.special_ids)


def test_every_token_decodes_to_its_own_visible_text(cache: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.make("tiny", cache))
    assert len(tokenizer) == 1024
    assert tokenizer.decode([500, 501]) == " w500 w501"
    assert tokenizer.decode(tokenizer.encode("Zug 7 é", add_special_tokens=False)) == "Zug 7 é"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode([1, 500, 2], skip_special_tokens=True).strip() == "w500"


def test_made_folder_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(models, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="no space"):
        models.make("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_node_makes_the_model_again_at_the_same_path(cache: Path, tmp_path: Path) -> None:
    found = models.resolve(tiny(), cache)
    elsewhere = replace(found, path=str(tmp_path / Path(found.path).name))
    models.ensure_here(elsewhere)
    assert models._revision(Path(elsewhere.path)) == found.revision


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"made": "huge"}, "choose one of tiny, lite"),
        ({"made": None}, "set one of them"),
        ({"path": "/x"}, "set one of them"),
        ({"made": None, "path": "/no/such/folder"}, "no such folder"),
        ({"made": None, "path": "nobody/no-such-model"}, "hf download nobody/no-such-model"),
        ({"load_format": "auto"}, "model.load_format=dummy"),
        ({"max_model_len": 9000}, "8192 positions"),
        ({"experts": 64}, "has 8"),
    ],
)
def test_error_says_how_to_mend_it(cache: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        models.resolve(tiny(**changes), cache)


def test_local_folder_with_nested_config(tmp_path: Path) -> None:
    text = {"vocab_size": 99, "num_experts": 16, "eos_token_id": [7, 8]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    (tmp_path / "model.safetensors").touch()
    found = models.resolve(tiny(made=None, path=str(tmp_path), load_format="auto"), tmp_path)
    assert (found.vocab_size, found.experts, found.special_ids) == (99, 16, (7, 8, 9))


def test_folder_that_is_missing_on_a_node_is_named(cache: Path) -> None:
    found = replace(models.resolve(tiny(), cache), made=None, path="/no/such/folder")
    with pytest.raises(ModelError, match="same path on every node"):
        models.ensure_here(found)
