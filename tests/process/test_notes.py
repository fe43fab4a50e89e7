"""What a start tells of a model's folder."""

from pathlib import Path

from shared.process.notes import tokenizer_notes


def test_a_tokenizer_that_is_not_read_is_told(tmp_path: Path):
    assert not [*tokenizer_notes(tmp_path)]
    (tmp_path / "tokenizer.model").touch()
    (told,) = tokenizer_notes(tmp_path)
    assert "no tokenizer.json" in told
    (tmp_path / "tokenizer.json").touch()
    assert not [*tokenizer_notes(tmp_path)]
