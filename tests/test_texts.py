from pathlib import Path

import pytest
import torch

from kvcompile.texts import TextError, cut_windows, read_text


def test_windows_follow_one_another_and_begin_alike() -> None:
    windows = cut_windows(range(100, 120), window=5, count=4, bos=1)
    assert torch.cat(windows).tolist() == [
        [1, 100, 101, 102, 103],
        [1, 104, 105, 106, 107],
        [1, 108, 109, 110, 111],
        [1, 112, 113, 114, 115],
    ]


def test_a_model_without_a_first_token() -> None:
    windows = cut_windows(range(10), window=5, count=2, bos=None)
    assert torch.cat(windows).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_too_short_a_text_says_how_long_it_is() -> None:
    with pytest.raises(TextError, match="kjv has 11 tokens, enough for 2 windows of 6; 3 were"):
        cut_windows(range(11), window=6, count=3, bos=1, name="kjv")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kjv.txt"
    path.write_text("In the beginning: λόγος", encoding="utf-8")
    text = read_text(str(path))
    assert (text.name, text.content) == ("kjv", "In the beginning: λόγος")


def test_the_language_reference() -> None:
    text = read_text("pydoc:")
    assert text.name == "pydoc"
    assert 'The "with" statement is used to wrap the execution of a block' in text.content
    assert len(text.content) > 300_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pydocs:", "cannot read 'pydocs:': No such file or directory: did you mean 'pydoc:'?"),
        ("{folder}/kjw.txt", "did you mean '{folder}/kjv.txt'?"),
        ("{folder}", "Is a directory"),
        ("{folder}/binary", "is not text in UTF-8"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "kjv.txt").write_text("text")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TextError) as caught:
        read_text(source.format(folder=tmp_path))
    assert message.format(folder=tmp_path) in str(caught.value)
