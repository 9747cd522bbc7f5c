"""Words that name a spec on a command line: each is one argument, in order or as name=value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eqaccel.errors import EqaccelError, SpecError


@dataclass(frozen=True)
class Word:
    """An argument of a spec.

    Attributes:
        name: Name of the argument.
        read: Makes its value of a text; raises a ValueError if it cannot.
        is_required: Whether there is no spec without it.
    """

    name: str
    read: Callable[[str], Any] = str
    is_required: bool = True


def usage(words: Sequence[Word]) -> str:
    """How they are written, for help and errors."""
    return " ".join(word.name.upper() if word.is_required else f"[{word.name}=...]" for word in words)


def read_words(words: Sequence[Word], texts: Sequence[str]) -> dict[str, Any]:
    """Reads texts as Python reads the arguments of a call.

    Args:
        words: What can be given, in order.
        texts: What was given: values in that order, or name=value.

    Returns:
        Values by name, of those that were given.

    Raises:
        SpecError: If there are too many or too few texts, one comes twice, or one cannot be read.
    """
    known = {word.name: word for word in words}
    values: dict[str, Any] = {}
    for number, text in enumerate(texts):
        name, _, value = text.partition("=")
        if name not in known:
            if number >= len(words):
                raise SpecError(f"spec: expected {usage(words) or 'no words'}, got {text!r} besides")
            name, value = words[number].name, text
        if name in values:
            raise SpecError(f"{name}: expected it once, got it twice, the second time as {text!r}")
        try:
            values[name] = known[name].read(value)
        except EqaccelError:
            raise
        except ValueError as error:
            raise SpecError(f"{name}: {error}") from error
    missing = [word.name for word in words if word.is_required and word.name not in values]
    if missing:
        raise SpecError(f"spec: expected {usage(words)}, got none of {', '.join(missing)}")
    return values


def yes_or_no(text: str) -> bool:
    """Reads "yes" or "no".

    Raises:
        ValueError: If it is neither.
    """
    if text not in ("yes", "no"):
        raise ValueError(f"expected yes or no, got {text!r}")
    return text == "yes"
