"""`dflash train_tokenizer`, beside what tests/data/test_tokenizer_training.py covers."""

import pytest

from dflash import train_tokenizer


def test_an_occupied_destination_is_refused_before_any_data_are_read(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    files = f"--files={tmp_path / 'none.jsonl'}"
    with pytest.raises(SystemExit, match=r"^2$"):
        train_tokenizer.main([str(tmp_path / "out"), "--datasets=", files])
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'out'}: already exists")
