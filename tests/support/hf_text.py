"""A small model of transformers with a tokenizer, in a folder."""

from __future__ import annotations

from pathlib import Path

from tests.support import hf_models

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "far",
    "away",
    "and",
    "then",
    "it",
    "was",
    "not",
    "here",
    "now",
    "END",
    "!",
    ".",
]
CHAT = (
    "{% for m in messages %}{{ m['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}then {% endif %}"
)


def save(folder: Path, model_type: str = "llama", *, chat: bool = True) -> None:
    """Writes a model of 9 heads in 3 key-value groups, and a tokenizer of words. Token 2 is the end
    of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = hf_models.make(model_type).eval()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    names = ["<unk>", "<s>", "</s>", *WORDS]
    names += [f"w{number}" for number in range(hf_models.VOCAB - len(names))]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT if chat else None
    tokenizer.save_pretrained(folder)
