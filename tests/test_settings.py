"""Settings: read when asked, by the runtime alone, and listed in one table."""

from __future__ import annotations

import re

import pytest
from folders import ROOT

from eqaccel import errors, settings


def test_the_table_lists_what_is_read() -> None:
    """Whoever reads a variable is C++, and knows no other name than users are told."""
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*.cpp")]
    read = {name for text in texts for name in re.findall(r'"(EQACCEL_[A-Z_]+)"', text)}
    assert read == set(settings.VARIABLES)
    for folder in ("eqaccel", "patches", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            found = re.findall(r"environ\b.*EQACCEL_|getenv\(.*EQACCEL_", path.read_text())
            assert not found, f"{path.relative_to(ROOT)} reads a setting by itself"


def test_settings_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert settings.current() == settings.Settings()
    monkeypatch.setenv("EQACCEL_TUNE", "1")
    assert settings.current() == settings.Settings(tune=True)
    monkeypatch.setenv("EQACCEL_COMPILE_LIMIT", "2.5")
    assert settings.current().compile_limit == 2.5
    monkeypatch.setenv("EQACCEL_COMPILE_LIMIT", "soon")
    with pytest.raises(errors.SettingsError, match="EQACCEL_COMPILE_LIMIT: expected seconds > 0, got 'soon'"):
        settings.current()


def test_a_yes_and_a_no_in_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("1", "true", "True", "YES", " on\n"):
        monkeypatch.setenv("EQACCEL_TUNE", text)
        assert settings.current().tune is True, text
    for text in ("0", "False", "no", "OFF", " ", ""):
        monkeypatch.setenv("EQACCEL_TUNE", text)
        assert settings.current().tune is False, text
    monkeypatch.setenv("EQACCEL_TUNE", "maybe")
    with pytest.raises(errors.SettingsError, match=r"EQACCEL_TUNE.*'maybe'"):
        settings.current()
