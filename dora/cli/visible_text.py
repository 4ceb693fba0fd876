"""Texts that others wrote, models above all, on a terminal.

Invariant: a terminal does nothing but show them: characters that would steer it are spelled out.
"""


def visible(text: str, *, newlines: bool = True) -> str:
    """`text` with what is not printable spelled out, line ends too unless `newlines`."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or (newlines and char == "\n")
        else char.encode("unicode_escape").decode()
        for char in text
    )
