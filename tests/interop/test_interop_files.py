"""Files of Hugging Face models: what is brought in goes out the same, and a bad file is named with its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.interop.tiny_hf import CASES, SIZES, config_of_case, make_folder, raw
from tests.tiny_run import tiny_tokenizer

from bessemer.cli import cli
from bessemer.config import declared
from bessemer.console import no_progress
from bessemer.data.tokenize import chat
from bessemer.data.tokenize.templates import OUR_TEMPLATE, ChatTemplate
from bessemer.data.tokenize.tokenizer import Tokenizer
from bessemer.errors import BessemerError, InputError, StorageError
from bessemer.generate.export import export_run
from bessemer.interop.config import HFConfig, config_of, type_of
from bessemer.interop.folder import CONFIG, INDEX, SINGLE, Folder, import_folder, token_ids, tokenizer_files
from bessemer.job import RunDirectory
from bessemer.models.gemma import Gemma
from bessemer.models.llama import Llama
from bessemer.models.olmo import Olmo
from bessemer.models.olmoe import Olmoe
from bessemer.storage.weights import WeightFile, write_file


@pytest.mark.parametrize("name", CASES)
def test_import_then_export_keeps_every_byte(name: str, tmp_path: Path) -> None:
    """Tensors, names, dtype and what the configuration says, through several files on both sides."""
    config = config_of_case(name)
    source = make_folder(tmp_path / "hf", config, dtype="bfloat16", shard=20_000)
    assert len(list(source.glob("*.safetensors"))) > 1
    run, lines = import_folder(source, tmp_path / "run")
    assert "bfloat16" in lines[0]
    assert not list(tmp_path.glob(".*importing"))
    export_run(run, tmp_path / "out", "hf", no_progress)
    assert raw(tmp_path / "out") == raw(source)
    assert Folder(tmp_path / "out").model == Folder(source).model


def test_a_large_export_is_split_and_indexed(tmp_path: Path) -> None:
    from bessemer.interop.folder import export_folder

    source = make_folder(tmp_path / "hf", config_of_case("llama3"))
    folder = Folder(source)
    export_folder(folder, folder.model, None, tmp_path / "out", shard=20_000)
    listed = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(set(listed["weight_map"].values())) > 2 and listed["metadata"]["total_size"] > 0
    assert raw(tmp_path / "out") == raw(source)


def test_tokenizer_and_chat_template_go_both_ways(tmp_path: Path) -> None:
    config = {**config_of_case("qwen2"), "vocab_size": 262, "eos_token_id": [2, 0]}
    source = make_folder(tmp_path / "hf", config, tokenizer=True)
    run, _ = import_folder(source, tmp_path / "run")
    export_run(run, tmp_path / "out", "hf", no_progress)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    there, here = (json.loads((path / "tokenizer_config.json").read_text()) for path in (source, tmp_path / "out"))
    assert here["chat_template"] == there["chat_template"] and here["eos_token"] == "<|im_end|>"
    assert Tokenizer.load(tmp_path / "out").hash == Tokenizer.load(source).hash
    made = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert made["eos_token_id"] == [2, 0] and made["bos_token_id"] == 0


def test_our_turns_as_a_template_are_our_turns() -> None:
    """What transformers would render with the exported template is what data/tokenize/chat.py writes."""
    ours = tiny_tokenizer()
    told = Tokenizer(ours.to_json(), chat_template=ChatTemplate(OUR_TEMPLATE, {"bos_token": "<|bos|>"}))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": [{"type": "python", "text": "2+2"}, {"type": "text", "text": "Four."}]},
        {"role": "user", "content": "And <|bos|>?"},
    ]
    for opened in (False, True):
        text = told.chat_template.render(messages, opened)  # type: ignore[union-attr]
        plain = [m for m in messages if "<|bos|>" not in m["content"]]
        rendered = told.chat_template.render(plain, opened)  # type: ignore[union-attr]
        assert text.startswith("<|bos|><|system_start|>Be brief.<|system_end|>")
        expected = chat.render(plain, ours, generation_prompt=opened)
        assert told.encode(rendered, allow_special=True) == expected


def test_our_own_tokenizer_comes_back_as_itself(tmp_path: Path) -> None:
    ours = tiny_tokenizer()
    ids = token_ids(Llama(vocab_size=300), ours)
    assert ids["eos_token_id"] == [ours.bos_id, ours.specials["<|assistant_end|>"]]
    files = tokenizer_files(ours, ids, 128)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == OUR_TEMPLATE
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Tokenizer.load(tmp_path).hash == ours.hash


# -- what is wrong is named ------------------------------------------------------------------------------------------


def changed(path: Path, **values: Any) -> None:
    """config.json with other values; None removes a key."""
    config = {**json.loads((path / CONFIG).read_text()), **values}
    (path / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def rewritten(path: Path, **tensors: np.ndarray | None) -> None:
    """model.safetensors with tensors replaced, added or (None) left out."""
    file = WeightFile(path / SINGLE)
    arrays = {name: file.read(name) for name in file.entries}
    arrays = {name: array for name, array in {**arrays, **tensors}.items() if array is not None}
    write_file(path / SINGLE, {n: (str(a.dtype), a.shape) for n, a in arrays.items()}, arrays.__getitem__, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "hf", config_of_case("llama3"))


def refused(path: Path, kind: type[BessemerError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        import_folder(path, path.parent / "run")
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not (path.parent / "run").exists() and not list(path.parent.glob(".*importing"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, ("'gpt2'", "GPT2LMHeadModel", "qwen3")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("rope_parameters", "'longrope'", "yarn")),
        ({"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters", "'factor'")),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ("'low_freq_factor'",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
        ({"intermediate_size": ...}, ("'intermediate_size'",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "num_attention_heads")),
        ({"num_hidden_layers": "two"}, ("num_hidden_layers", "'two'", "integer")),
        ({"num_hidden_layers": 10_000_000}, ("num_hidden_layers", "10000000")),
        ({"num_hidden_layers": 1000}, ("num_hidden_layers", "1000", "2 layers")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"hidden_size": 2**62}, ("hidden_size", str(2**62))),
        ({"hidden_size": "32"}, ("hidden_size", "'32'", "integer")),
        ({"hidden_size": 2**31 - 1, "head_dim": ...}, ("head_dim",)),
        ({"num_attention_heads": 0}, ("num_attention_heads", "0")),
        ({"num_attention_heads": -4}, ("num_attention_heads", "-4")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads", "0")),
        ({"head_dim": 0}, ("head_dim", "0")),
        ({"head_dim": 7}, ("head_dim", "7", "even")),
        ({"intermediate_size": [1]}, ("intermediate_size", "[1]")),
        ({"vocab_size": 2**62}, ("vocab_size", str(2**62))),
        ({"vocab_size": 1.5}, ("vocab_size", "1.5")),
        ({"max_position_embeddings": "long"}, ("max_position_embeddings", "'long'")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
        ({"rms_norm_eps": "1e-5"}, ("rms_norm_eps", "'1e-5'")),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps", "finite")),
        ({"tie_word_embeddings": "false"}, ("tie_word_embeddings", "'false'", "without quotes")),
        ({"attention_bias": "no"}, ("attention_bias", "'no'")),
        ({"mlp_bias": 0}, ("mlp_bias", "0")),
        ({"rope_parameters": ..., "rope_scaling": "linear"}, ("rope_scaling", "'linear'", "object")),
        ({"rope_parameters": ["yarn"]}, ("rope_parameters", "['yarn']")),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ("rope_parameters", "['yarn']")),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ("rope_parameters.factor", "'2'")),
        ({"rope_parameters": {"rope_theta": "x"}}, ("rope_parameters.rope_theta", "'x'")),
        ({"hidden_act": 3}, ("hidden_act", "3")),
        ({"model_type": {"a": 1}, "architectures": 5}, ("model_type",)),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
        ({"model_type": "mistral", "sliding_window": "wide"}, ("sliding_window", "'wide'")),
        ({"model_type": "qwen2", "use_sliding_window": "true", "sliding_window": 8}, ("use_sliding_window", "'true'")),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": 5},
            ("layer_types", "5"),
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": [{}, []]},
            ("layer_types", "{}"),
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ("no_rope_layers", "[1]", "2 layers")),
        ({"model_type": "smollm3", "no_rope_layers": [1, "0"]}, ("no_rope_layers", "'0'")),
        ({"model_type": "smollm3", "no_rope_layers": 4}, ("no_rope_layers", "4")),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, ("no_rope_layer_interval", "0")),
        ({"model_type": "olmo3", "sliding_window": None, "rope_parameters": ...}, ("'sliding_window'",)),
        (
            {"model_type": "olmo3", "rope_parameters": ..., "rope_theta": 7.0},
            ("rope_theta", "7.0", "sliding_attention"),
        ),
        ({"model_type": "olmo3", "rope_parameters": {"rope_theta": 7.0}}, ("rope_parameters", "'rope_theta'")),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            ("rope_parameters.sliding_attention", "linear"),
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            ("rope_parameters.full_attention", "'longrope'"),
        ),
        ({"model_type": "olmo2", "hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, ("num_local_experts", "1 to 4,096")),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, ("num_experts_per_tok", "8 experts")),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, ("router_jitter_noise", "0.1")),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ("mlp_only_layers", "[0]")),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ("decoder_sparse_step", "2")),
        ({"model_type": "qwen3_moe", "norm_topk_prob": "true"}, ("norm_topk_prob", "'true'")),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, ("clip_qkv", "8.0")),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, ("hidden_activation", "'silu'")),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, ("query_pre_attn_scalar", "0")),
        ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, ("attn_logit_softcapping", "'50'")),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, ("final_logit_softcapping", "0", "null")),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ("use_bidirectional_attention", "causal")),
        (
            {"model_type": "gemma3_text", "rope_parameters": ..., "attn_logit_softcapping": 50.0},
            ("attn_logit_softcapping", "50.0"),
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": ..., "sliding_window_pattern": 0},
            ("sliding_window_pattern",),
        ),
        ({"model_type": "gemma3", "text_config": {}}, ("'gemma3'", "gemma3_text")),
        (
            {"model_type": "smollm3", "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            ("layer_types", "use_sliding_window"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_followed(folder: Path, values: dict, words: tuple[str, ...]) -> None:
    changed(folder, **values)
    refused(folder, InputError, str(folder / CONFIG), *words)


def test_damaged_and_wrong_weights(folder: Path) -> None:
    weights = folder / SINGLE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(folder, StorageError, str(weights), "cut off", "'model.norm.weight'")
    weights.write_bytes(whole[:20])
    refused(folder, StorageError, str(weights))
    weights.write_bytes(whole)
    name = "model.layers.1.mlp.up_proj.weight"
    rewritten(folder, **{name: np.zeros((3, 32), np.float32)})
    refused(folder, StorageError, str(weights), name, "(3, 32)", "(48, 32)")
    rewritten(folder, **{name: None})
    refused(folder, StorageError, str(weights), name)
    weights.write_bytes(whole)
    rewritten(folder, **{"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)})
    refused(folder, StorageError, "model.layers.0.self_attn.q_proj.bias")
    weights.write_bytes(whole)
    rewritten(folder, **{name: np.zeros((48, 32), np.int8)})
    refused(folder, StorageError, name, "int8")
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, InputError, SINGLE, "pytorch_model.bin", "pickle")


def with_header(path: Path, text: str, data: bytes = b"") -> None:
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, ("nested",)),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, ("nested",)),
        ("[5]", ("malformed",)),
        ('{"a": 5}', ("malformed",)),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": 3}}', ("malformed",)),
        ('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', ("malformed",)),
        ('{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}', ("'a'", "integers")),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', ("'a'", "data_offsets")),
        ('{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', ("'a'", "shape")),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
            '"b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
            ("'a' and 'b'", "overlap"),
        ),
    ],
)
def test_a_malformed_safetensors_header_is_bad_input(folder: Path, header: str, words: tuple[str, ...]) -> None:
    with_header(folder / SINGLE, header, b"\0" * 64)
    refused(folder, InputError, str(folder / SINGLE), *words)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json", "notes.txt"])
def test_links_out_of_a_model_folder_are_not_followed(folder: Path, name: str) -> None:
    private = folder.parent / "private.json"
    private.write_text('{"password": "AKIA"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(private)
    refused(folder, InputError, str(folder / name), "links to")


def test_a_snapshot_of_the_hubs_cache_is_links_to_its_own_blobs(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(model / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    run, _ = import_folder(snapshot, tmp_path / "run")
    assert (run.model / SINGLE).is_file()


def test_a_deeply_nested_configuration_is_bad_input(folder: Path) -> None:
    (folder / CONFIG).write_text('{"model_type": "llama", "a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    refused(folder, InputError, str(folder / CONFIG), "nested")


def test_an_index_that_does_not_match_its_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", config_of_case("mistral"), shard=20_000)
    index = folder / INDEX
    listed = json.loads(index.read_text())["weight_map"]
    names = list(listed)

    def with_map(places: dict[str, str]) -> None:
        index.write_text(json.dumps({"weight_map": places}))

    with_map({name: part for name, part in listed.items() if name != names[3]})
    refused(folder, StorageError, str(index), names[3])
    with_map({**listed, names[0]: listed[names[-1]]})
    refused(folder, StorageError, str(index), names[0], listed[names[-1]])
    for part in ("../elsewhere.safetensors", "/dev/zero", 5, None, ["a"], {"a": 1}, "", "a\0b"):
        with_map({**listed, names[0]: part})
        refused(folder, InputError, str(index), "weight_map", names[0], repr(part))
    with_map(listed)
    (folder / listed[names[-1]]).unlink()
    refused(folder, StorageError, str(index), listed[names[-1]])


def test_an_existing_target_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    run, _ = import_folder(folder, tmp_path / "run")
    with pytest.raises(InputError, match="already exists"):
        import_folder(folder, tmp_path / "run")
    with pytest.raises(InputError, match="not an empty directory"):
        export_run(run, folder, "hf", no_progress)


def test_the_type_of_an_export_says_all_of_the_model() -> None:
    sizes: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "head_dim": 8, "vocab_size": 67}
    kinds = {
        "llama": {},
        "mistral": {"sliding_window": 4},
        "qwen2": {"attention_bias": "qkv"},
        "qwen3": {"head_norm": True, "sliding_window": 4, "sliding_layers": "LS"},
        "smollm3": {"rotary_layers": "RN", "sliding_window": 4, "sliding_layers": "LS", "mlp_bias": True},
    }
    for kind, values in kinds.items():
        model = Llama(**sizes, **values)
        assert type_of(model) == kind
        again = HFConfig(config_of(model, "float32", {}), "config.json").settings()
        assert again["model/sliding_window"] == model.sliding_window
        assert again["architecture/attention_bias"] == model.attention_bias
        assert again["architecture/head_norm"] == model.head_norm
        assert again["model/rotary_layers"] == model.rotary_layers
    with pytest.raises(InputError, match=r"mistral cannot express architecture\.mlp_bias"):
        type_of(Llama(**sizes, sliding_window=4, mlp_bias=True))
    with pytest.raises(InputError, match=r"qwen3 cannot express model\.rotary_layers"):
        type_of(Llama(**sizes, rotary_layers="NR", hf_type="qwen3", head_norm=True))


def test_the_type_of_an_exported_olmo_or_gemma_says_all_of_it() -> None:
    sizes: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "head_dim": 8, "vocab_size": 67}
    slides: dict[str, Any] = {"sliding_window": 4, "sliding_layers": "SL"}
    linear: dict[str, Any] = {"rope_type": "linear", "rope_factor": 8.0, "rope_original_length": 512}
    yarn: dict[str, Any] = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_length": 32}
    exported: list[tuple[str, Llama]] = [
        ("olmo2", Olmo(**sizes, **yarn)),
        ("olmo3", Olmo(**sizes, **slides, **yarn, rope_local_base=100.0)),
        ("olmo3", Olmo(**sizes, **slides, **yarn)),  # sliding layers scaled as the others
        ("gemma2", Gemma(**sizes, **slides, head_norm=False, attention_cap=50.0, softcap=30.0, query_scalar=24)),
        ("gemma3_text", Gemma(**sizes, **slides, **linear, rope_local_base=100.0)),
        ("gemma3_text", Gemma(**sizes, softcap=30.0, tied_head=False)),
    ]
    for kind, model in exported:
        assert type_of(model) == kind
        read = HFConfig(config_of(model, "float32", {}), "config.json").settings()
        names = {setting.key: name for name, setting in declared(type(model)).items()}
        again = type(model)(**{names[key]: value for key, value in read.items() if key in names})
        assert again.ropes == model.ropes and again.shape == model.shape
        for name in ("head_norm", "tied_head", *(("attention_cap", "softcap") if "gemma" in kind else ())):
            assert getattr(again, name) == getattr(model, name), (kind, name)
    for model, words in (
        (Olmo(**sizes, sliding_window=4, hf_type="olmo2"), r"olmo2 .* model\.sliding_window=4"),
        (Gemma(**sizes, hf_type="gemma2", rope_local_base=5.0, head_norm=False), r"architecture\.rope\.local_base=5"),
        (Gemma(**sizes, attention_cap=50.0), r"gemma3_text .* architecture\.attention_cap=50"),
        (Gemma(**{**sizes, "width": 30}), r"model\.heads=4"),
        (Llama(**sizes, rope_local_base=5.0), r"architecture\.rope\.local_base=5"),
    ):
        with pytest.raises(InputError, match=words):
            type_of(model)


def test_the_type_of_exported_experts_says_all_of_them() -> None:
    sizes: dict[str, Any] = {"depth": 2, "width": 32, "heads": 4, "head_dim": 8, "vocab_size": 67, "mlp_width": 40}
    made: dict[str, Any] = {"experts": 5, "experts_active": 3, "expert_score": "softmax", "expert_balance": "loss"}
    exported: list[tuple[str, Llama]] = [
        ("mixtral", Llama(**sizes, **made, expert_width=24, sliding_window=4)),
        ("qwen3_moe", Llama(**sizes, **made, expert_width=24, expert_normalize=False, head_norm=True)),
        ("olmoe", Olmoe(**sizes, **made, expert_width=24, expert_aux_loss=0.5)),
    ]
    for kind, model in exported:
        assert type_of(model) == kind
        read = HFConfig(config_of(model, "float32", {}), "config.json").settings()
        names = {setting.key: name for name, setting in declared(type(model)).items()}
        again = type(model)(**{names[key]: value for key, value in read.items() if key in names})
        assert again.shape.experts == model.shape.experts and again.shape.windows == model.shape.windows
        assert again.count_parameters() == model.count_parameters()
        for name in ("head_norm", "expert_score", "expert_normalize", "expert_aux_loss"):
            assert getattr(again, name) == getattr(model, name), (kind, name)
        assert again.expert_balance == "none"  # asked for again in a run that trains it
    for change, words in (
        ({"expert_balance": "bias"}, r"mixtral .* architecture\.experts\.balance=bias"),
        ({"expert_score": "sigmoid"}, r"architecture\.experts\.score=sigmoid"),
        ({"experts_shared": 1}, r"model\.experts_shared=1"),
        ({"hf_type": "llama"}, r"llama .* model\.experts=5"),
        ({"hf_type": "mixtral", "expert_normalize": False}, r"architecture\.experts\.normalize=False"),
    ):
        with pytest.raises(InputError, match=words):
            type_of(Llama(**{**sizes, **made, **change}))
    with pytest.raises(InputError, match=r"mixtral .* model\.experts=0"):
        type_of(Llama(**sizes, hf_type="mixtral"))


def test_keys_that_a_configuration_leaves_out_have_the_values_of_its_type() -> None:
    """As the classes of transformers have them."""
    given = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    read = HFConfig({"model_type": "smollm3", "num_hidden_layers": 8, **given}, "config.json").settings()
    assert read["model/rotary_layers"] == "RRRNRRRN" and read["model/tied_head"] and read["model/kv_heads"] == 4
    assert read["architecture/rotary_base"] == 2_000_000.0 and read["model/sliding_window"] == 0
    read = HFConfig({"model_type": "gemma3_text", "num_hidden_layers": 7, **given}, "config.json").settings()
    assert read["model/sliding_layers"] == "SSSSSLS" and read["model/sliding_window"] == 4096
    assert read["architecture/rotary_base"] == 1_000_000.0 and read["architecture/rope/local_base"] == 10_000.0
    assert read["model/head_dim"] == 256 == read["architecture/query_scalar"] and read["model/tied_head"]
    read = HFConfig({"model_type": "gemma2", "num_hidden_layers": 3, **given}, "config.json").settings()
    assert read["model/sliding_layers"] == "SLS" and read["architecture/attention_cap"] == 50.0
    read = HFConfig({"model_type": "olmo3", "num_hidden_layers": 5, **given}, "config.json").settings()
    assert read["model/sliding_layers"] == "SSSLS" and read["architecture/rotary_base"] == 500_000.0
    for kind, sizes in (("mixtral", (8, 2, 48)), ("qwen3_moe", (128, 8, 768)), ("olmoe", (64, 8, 48))):
        few = {"num_hidden_layers": 2, "num_key_value_heads": 2, **given}
        read = HFConfig({"model_type": kind, **few}, "config.json").settings()
        assert tuple(read[f"model/{name}"] for name in ("experts", "experts_active", "expert_width")) == sizes
        assert read["architecture/experts/normalize"] == (kind == "mixtral") and read["model/sliding_window"] == 0


def test_gpt_is_exported_in_our_own_format_and_says_so(tmp_path: Path) -> None:
    from tests.tiny_run import make_run, tiny_params

    run = make_run(tmp_path, steps=(10,))
    lines = export_run(run, tmp_path / "out", "hf", no_progress)
    assert any("our own format" in line for line in lines)
    file = WeightFile(tmp_path / "out" / SINGLE)
    assert file.metadata["step"] == "10"
    np.testing.assert_array_equal(file.read("blocks_0/q"), np.asarray(tiny_params(10)["blocks_0"]["q"]))
    (tmp_path / "again").mkdir()
    (tmp_path / "out").rename(tmp_path / "again" / "model")  # as RUN/model: a run that can be loaded
    from bessemer.generate import load_model

    assert load_model(RunDirectory(tmp_path / "again")).step == 10


def test_the_commands_and_what_others_make_of_an_imported_run(folder: Path, tmp_path: Path) -> None:
    def call(*words: str) -> str:
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    run = str(tmp_path / "runs" / "brought")
    (tmp_path / "runs").mkdir()
    assert "llama" in call("import", str(folder), run, "--context", "64")
    assert "exported" in call("export", run, str(tmp_path / "out"), "--dtype", "bfloat16")
    assert Folder(tmp_path / "out").model.weights_dtype == "bfloat16"
    assert "brought" in call("runs", str(tmp_path / "runs"))
    assert "\nerror" not in call("doctor", run)
    call("report", run)
    assert "finished" in call("resume", run)
