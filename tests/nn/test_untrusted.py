"""Whatever is wrong with a file is one ValueError that names it."""

import pytest

from jaxlab.nn.untrusted import read_object, refused


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' * 100_000, b"[1]", b"null"])
def test_files_that_hold_no_object(content, tmp_path):
    path = tmp_path / "settings.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"settings\.json is damaged"):
        read_object(path)


def test_values_of_a_wrong_kind():
    for use in (lambda: {}["a"], lambda: "a" + 1, lambda: 1 // 0, lambda: None.get("a"), lambda: [][0]):
        with pytest.raises(ValueError, match="the file holds something that cannot be used"), refused("the file"):
            use()
    with pytest.raises(ValueError, match=r"^as it was$"), refused("the file"):
        raise ValueError("as it was")
