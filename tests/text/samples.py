"""Text that servers of this sort have got wrong."""

TEXTS = [
    "",
    " leading space",
    "  two, and trailing  ",
    "\n\nnew\tlines\r\n",
    "<b>bold</b> and List<int> and a < b > c",
    "naïve café Ünïcödé",
    "你好,世界。日本語テキスト",
    "🙂🎉 family 👩‍👩‍👧‍👦 flag 🇨🇭 skin 👍🏽",
    "�genuine � replacement�",
    "<0x41> looks like a byte, <|im_end|> like a marker, <s> too </s>",
    "don't , isn 't . spaces before punctuation !",
    "zero\0byte and \u200bzero width",
    "▁real low line▁",
]


def cut(text: str, size: int) -> list[str]:
    """The text in pieces of `size` characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]
