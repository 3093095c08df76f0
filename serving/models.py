"""Models to serve: made ones without weights, local folders, and hub ids already on disk.

Nothing is downloaded: a benchmark that fetches a model in the middle measures the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# DeepSeek-V2's architecture, and a dense one. `tiny` and `tiny_dense` run on two CPU cores;
# `lite` has the published shape of DeepSeek-V2-Lite-Chat (16 B parameters, 64 experts).
_SHARED: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "torch_dtype": "bfloat16", "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
    "scoring_func": "softmax", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "tie_word_embeddings": False, "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
        "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "v_head_dim": 64, "qk_nope_head_dim": 64,
        "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    },
    "lite": {
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "max_position_embeddings": 163840, "bos_token_id": 100000, "eos_token_id": 100001,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
}  # fmt: skip
_SHAPES = {name: _SHARED | shape for name, shape in _SHAPES.items()}
_SHAPES["tiny_dense"] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False,
    "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODEL_CACHE = Path("~/.cache/ep_ray/models").expanduser()
_SPECIAL = ("<pad>", "<s>", "</s>")
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class ModelError(RuntimeError):
    """The model that an experiment asks for is not here, or does not fit; says how to mend it."""


@dataclass(frozen=True)
class ResolvedModel:
    """A model folder on disk and what the benchmark must know about it.

    Attributes:
        name: Name under which it is served.
        path: Folder with `config.json`.
        revision: A hub snapshot's commit, else `sha256:` of the folder's JSON files.
        made: Shape, if it was made here; another node makes it again at the same path.
        vocab_size: Token ids are 0 to vocab_size - 1.
        special_ids: Ids that a random prompt must avoid.
        max_model_len: Longest prompt + completion, in tokens.
        experts: Routed experts; null for a dense model.
    """

    name: str
    path: str
    revision: str
    made: str | None
    vocab_size: int
    special_ids: tuple[int, ...]
    max_model_len: int
    experts: int | None


def resolve(model: Any, cache_dir: str | Path) -> ResolvedModel:
    """Finds or makes the model, and checks it against its configuration, before anything starts.

    Args:
        model: `ep_ray.config.schema.Model`, or a node of the same shape.
        cache_dir: Receives made models.

    Raises:
        ModelError: It is missing, lacks weights, or contradicts its configuration.
    """
    if model.made is not None and model.path is not None:
        raise ModelError(f"model.made={model.made} and model.path={model.path}: set one of them")
    if model.made is not None:
        path = make(model.made, cache_dir)
    elif model.path is not None:
        path = _find(model.path, model.revision)
    else:
        raise ModelError("model.made and model.path are both null: set one of them")
    _check_weights(path, model.load_format)
    config = _read_json(path / "config.json")
    text = config.get("text_config") or config
    resolved = ResolvedModel(
        name=model.name,
        path=str(path),
        revision=_revision(path),
        made=model.made,
        vocab_size=model.vocab_size or text.get("vocab_size") or 0,
        special_ids=tuple(sorted(set(_special_ids(path, text)))),
        max_model_len=model.max_model_len,
        experts=next((int(text[key]) for key in _EXPERT_KEYS if text.get(key)), None),
    )
    _check_limits(resolved, text, model.experts)
    return resolved


def tokenizer_file(model: Any, cache_dir: str | Path) -> str | None:
    """`tokenizer.json` of a model that is on this machine; None where there is none.

    Args:
        model: As for `resolve`.
        cache_dir: Receives made models.
    """
    try:
        if model.made is not None:
            folder = make(model.made, cache_dir)
        elif model.path is not None:
            folder = _find(model.path, model.revision)
        else:
            return None
    except ModelError:  # `resolve` says why
        return None
    found = folder / "tokenizer.json"
    return str(found) if found.is_file() else None


def make(shape: str, cache_dir: str | Path) -> Path:
    """Writes `config.json` and a tokenizer of a known shape, once per content. Returns the folder.

    The tokenizer covers the whole vocabulary (bytes, then one made-up word per id), so that
    every generated token decodes to visible text. It encodes text byte by byte.
    """
    if shape not in _SHAPES:
        raise ModelError(f"model.made={shape!r} is unknown: choose one of {', '.join(_SHAPES)}")
    config = _SHAPES[shape]
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(cache_dir).resolve() / f"{shape}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (draft / "config.json").write_text(json.dumps(config, indent=2))
        _write_tokenizer(draft, config["vocab_size"])
        os.chmod(draft, 0o755)
        os.rename(draft, folder)  # fails if another process was first: its folder is the same
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def ensure_here(model: ResolvedModel) -> None:
    """Makes sure that the folder exists on this node too: made models are made, others missed."""
    if Path(model.path, "config.json").is_file():
        return
    if model.made is None:
        raise ModelError(f"{model.path} is not on this node: put the model at the same path on "
                         "every node, or use a shared file system")  # fmt: skip
    make(model.made, Path(model.path).parent)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"\u0120w{i}" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = _SPECIAL
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "bos_token": bos,
                "eos_token": eos, "clean_up_tokenization_spaces": False}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _find(path: str, revision: str | None) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path={path} has no config.json: is it a model folder?")
        return folder.resolve()
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ModelError(f"model.path={path}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception as error:
        at = f" --revision {revision}" if revision else ""
        raise ModelError(f"model.path={path} is neither a folder nor in the local Hugging Face "
                         f"cache; fetch it first: hf download {path}{at}") from error  # fmt: skip


def _check_weights(path: Path, load_format: str) -> None:
    if load_format != "dummy" and not any(next(path.glob(p), None) for p in _WEIGHTS):
        raise ModelError(f"{path} has no weights and model.load_format={load_format}: "
                         "use model.load_format=dummy, or a folder with weights")  # fmt: skip


def _check_limits(model: ResolvedModel, config: dict[str, Any], experts: int | None) -> None:
    longest = config.get("max_position_embeddings")
    if longest and model.max_model_len > longest:
        raise ModelError(f"model.max_model_len={model.max_model_len} exceeds the "
                         f"{longest} positions of {model.path}")  # fmt: skip
    if experts is not None and (experts or None) != model.experts:
        raise ModelError(f"model.experts={experts}, but {model.path} has {model.experts}")
    if model.vocab_size < 1:
        raise ModelError(f"{model.path}/config.json has no vocab_size: set model.vocab_size=")


def _special_ids(path: Path, config: dict[str, Any]) -> Iterator[int]:
    """Ids with a meaning of their own, from every file that may name them."""
    for source in (config, _read_json(path / "generation_config.json")):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = source.get(key)
            yield from value if isinstance(value, list) else [] if value is None else [value]
    for token in _read_json(path / "tokenizer.json").get("added_tokens", []):
        if token.get("special"):
            yield int(token["id"])


def _revision(path: Path) -> str:
    """A hub snapshot lies in a folder named by its commit; of others the JSON files are hashed."""
    if path.parent.name == "snapshots":
        return path.name
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.json")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"sha256:{digest.hexdigest()}"


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
