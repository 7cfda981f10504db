"""Counts, bytes and stop ids equal to transformers' own."""

import json

import pytest

from ddtree.text import load
from ddtree.text.tokenizer import Tokenizer, read_eos_ids
from tests.text.conftest import CHATML, KINDS
from tests.text.samples import TEXTS


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_encode_and_decode_equal_transformers(any_tokenizer, text, special):
    ids = any_tokenizer.encode(text, add_special_tokens=special)
    pretrained = any_tokenizer.pretrained
    assert ids == pretrained.encode(text, add_special_tokens=special)
    for skip in (True, False):
        expected = pretrained.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert any_tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_special_tokens_once_for_a_completion_none_for_a_chat():
    tokenizer = Tokenizer(KINDS["llama2"]())
    assert tokenizer.encode("fox")[0] == 1
    assert tokenizer.encode("fox").count(1) == 1
    assert 1 not in tokenizer.encode("fox", add_special_tokens=False)


def test_token_bytes_rebuild_the_text(any_tokenizer):
    for text in ("The quick brown fox", "def sort(items)"):
        ids = any_tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(any_tokenizer.token_bytes(token_id) for token_id in ids).decode()
        assert joined.removeprefix(" ") == text


def test_token_bytes_of_pieces_of_a_character(byte_tokenizer):
    ids = byte_tokenizer.encode("🫠é", add_special_tokens=False)
    assert b"".join(byte_tokenizer.token_bytes(token_id) for token_id in ids) == "🫠é".encode()
    gemma = Tokenizer(KINDS["gemma"]())
    ids = gemma.encode("🫠", add_special_tokens=False)
    assert [gemma.token_bytes(token_id) for token_id in ids] == [bytes([byte]) for byte in "🫠".encode()]


def test_token_bytes_of_special_and_unknown_ids(byte_tokenizer):
    special = byte_tokenizer.backend.token_to_id("<|im_end|>")
    assert byte_tokenizer.token_bytes(special) == b"<|im_end|>"
    assert byte_tokenizer.token_bytes(special, skip_special_tokens=True) == b""
    assert byte_tokenizer.token_bytes(byte_tokenizer.vocab_size + 7) == b""
    think = byte_tokenizer.backend.token_to_id("<think>")
    assert byte_tokenizer.token_bytes(think, skip_special_tokens=True) == b"<think>"
    assert byte_tokenizer.token_text(think) == "<think>"


def test_special_ids_come_from_the_flag_not_from_the_look(byte_tokenizer):
    names = {byte_tokenizer.token_text(token_id) for token_id in byte_tokenizer.special_ids}
    assert names == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def test_half_a_surrogate_pair_is_a_value_error(byte_tokenizer):
    with pytest.raises(ValueError, match="surrogate pair at character 1"):
        byte_tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="expected a string, got int"):
        byte_tokenizer.encode(3)


def test_a_published_cut_is_not_applied():
    pretrained = KINDS["byte_level"]()
    pretrained.backend_tokenizer.enable_truncation(2)
    assert len(Tokenizer(pretrained).encode("The quick brown fox jumps")) > 2


def test_eos_is_the_union_of_all_that_say_it(tmp_path):
    pretrained = KINDS["byte_level"]()
    pretrained.eos_token = "<|endoftext|>"
    pretrained.save_pretrained(tmp_path)
    end = pretrained.convert_tokens_to_ids("<|endoftext|>")
    marker = pretrained.convert_tokens_to_ids("<|im_end|>")
    assert Tokenizer.load(tmp_path).eos_token_ids == {end}  # the marker is a token, but no template writes it
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [77, 78]}))
    assert Tokenizer.load(tmp_path).eos_token_ids == {77, 78, end, marker}


def test_eos_of_the_configurations(tmp_path):
    assert read_eos_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 5}}')
    assert read_eos_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert read_eos_ids(tmp_path) == {0}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json: not JSON"):
        read_eos_ids(tmp_path)


def test_a_path_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected tokenizer.json or one .gguf, found 0"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="expected a folder or a .gguf file"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("not json")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        Tokenizer.load(tmp_path)


def test_smollm2(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == {2}
    assert smollm2.special_ids == set(range(17))


@pytest.mark.real
def test_the_kept_copy_equals_a_fresh_conversion(smollm2_file, tmp_path, monkeypatch):
    link = tmp_path / smollm2_file.name
    link.symlink_to(smollm2_file)
    fresh = Tokenizer(load.load_pretrained(link))
    kept = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(kept) == 1 and (kept[0] / "tokenizer.json").is_file()
    copy = Tokenizer(load.load_pretrained(tmp_path))
    for text in TEXTS:
        assert copy.encode(text) == fresh.encode(text)
        assert copy.decode(copy.encode(text)) == fresh.decode(fresh.encode(text))
    assert copy.backend.to_str() == fresh.backend.to_str()
    assert copy.chat_template == fresh.chat_template
    assert copy.eos_token_ids == fresh.eos_token_ids


def test_a_damaged_copy_is_converted_again(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    kept = load._kept_folder(file)
    kept.mkdir()
    (kept / "tokenizer.json").write_text("{")

    def from_pretrained(folder, gguf_file=None, **options):
        if gguf_file is None:
            raise OSError("damaged")
        return KINDS["byte_level"]()

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    load.load_pretrained(file)
    assert (kept / "tokenizer.json").stat().st_size > 1000


def test_a_quicker_copy_stays(tmp_path):
    folder = tmp_path / "kept"
    load._keep(KINDS["byte_level"](), folder)
    (folder / "mine").write_text("")
    load._keep(KINDS["byte_level"](), folder)
    assert (folder / "mine").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path):
    load._keep(KINDS["byte_level"](), tmp_path / "absent" / "kept")
    assert not list(tmp_path.iterdir())
