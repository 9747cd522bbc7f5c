"""The code in the documentation, so that tests run it as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from folders import ROOT

from eqaccel.__main__ import main


def python_blocks(text: str | Path) -> list[str]:
    """The Python code of a text, block by block."""
    content = (ROOT / text).read_text()
    return re.findall(r"^```python\n(.*?)^```", content, flags=re.MULTILINE | re.DOTALL)


def inline_codes(text: str | Path) -> list[str]:
    """What a text has as code in its lines and tables and names eqaccel: calls, commands, settings."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / text).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [code for code in re.findall(r"`([^`\n]+)`", prose) if "eqaccel" in code]


def run_command(line: str) -> None:
    """Runs a line that a user types, of eqaccel's own commands; it has to succeed."""
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "eqaccel"]
    assert main(words[3:]) == 0
