"""Small tokenizers of every kind that we meet, built on the spot; and the real SmolLM2's where it is cached."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from ddtree.sources import cache_dir
from ddtree.text.tokenizer import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def sort(items: List<int>) -> <b>bold</b>\n",
    "naïve café, 你好世界, 🙂🎉👩‍👩‍👧, Привет\n",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(
    "assistant\n",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}",
)


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    backend.train_from_iterator(LINES, trainer)
    # Not special: it must stay visible. One with a space and an accent takes the decoder's other branch.
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é à", normalized=False)])
    return backend


def sentencepiece(strip: bool) -> Backend:
    """Llama 2's shape (`strip`) or Gemma's: byte tokens, ▁ for a space."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials)
    backend.train_from_iterator([line.replace(" ", "▁") for line in LINES[:2]], trainer)
    state = backend.to_str()
    # The trainer marks the byte tokens special; in published files only the first three are.
    backend = Backend.from_str(_unmark(state, keep=3))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return backend


def _unmark(state: str, keep: int) -> str:
    import json

    parsed = json.loads(state)
    parsed["added_tokens"] = parsed["added_tokens"][:keep]
    return json.dumps(parsed)


def metaspace() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(LINES, trainer)
    return backend


def split_digits() -> Backend:
    """Byte-level as Llama 3 and Qwen write it: the split is a Sequence of a regex and ByteLevel."""
    backend = byte_level()
    split = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+|."), "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return backend


KINDS = {
    "byte_level": lambda: wrap(byte_level(), eos_token="<|im_end|>"),
    "split_digits": lambda: wrap(split_digits(), eos_token="<|im_end|>", bos_token="<|im_start|>"),
    "llama2": lambda: wrap(sentencepiece(strip=True), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "gemma": lambda: wrap(sentencepiece(strip=False), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "metaspace": lambda: wrap(metaspace(), eos_token="</s>", unk_token="<unk>"),
}


def wrap(backend: Backend, **names: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


@pytest.fixture(scope="session", params=sorted(KINDS))
def any_tokenizer(request) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(KINDS["byte_level"]())


@pytest.fixture
def chat_tokenizer() -> Tokenizer:
    pretrained = KINDS["byte_level"]()
    pretrained.chat_template = CHATML
    return Tokenizer(pretrained)


@pytest.fixture
def thinking_tokenizer() -> Tokenizer:
    pretrained = KINDS["byte_level"]()
    pretrained.chat_template = THINKING
    return Tokenizer(pretrained)


@pytest.fixture(scope="session")
def smollm2_file():
    file = cache_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.is_file():
        pytest.skip("SmolLM2 is not in the cache (ddtree fetch smollm2)")
    return file


@pytest.fixture(scope="session")
def smollm2(smollm2_file) -> Tokenizer:
    return Tokenizer.load(smollm2_file)
