"""Files of llama2.c: a synthetic one, and a real one whose greedy story is known to the character."""

import struct

import jax
import numpy as np
import pytest

from jaxlab.data import resolve
from jaxlab.nn import generate
from jaxlab.nn.checkpoints import load
from jaxlab.nn.checkpoints.llama2c import open_llama2c, read_llama2c_tokenizer

SIZES = {"hidden": 8, "intermediate": 6, "layers": 2, "heads": 2, "kv_heads": 1, "vocabulary": 5, "length": 4}


def write(path, *, tied, more=b""):
    """Every number of the file is its place in it."""
    d, f, n, v = SIZES["hidden"], SIZES["intermediate"], SIZES["layers"], SIZES["vocabulary"]
    count = v * d + n * (d + d * d + 4 * d + 4 * d + d * d + d + 3 * f * d) + d + 2 * 4 * 2 + (0 if tied else v * d)
    sizes = [*SIZES.values()]
    sizes[5] *= 1 if tied else -1
    path.write_bytes(struct.pack("<7i", *sizes) + np.arange(count, dtype="<f4").tobytes() + more)
    return count


@pytest.mark.parametrize("tied", [True, False])
def test_layout(tied, tmp_path):
    count = write(tmp_path / "model.bin", tied=tied)
    config, tensors = open_llama2c(tmp_path / "model.bin")
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in tensors) is not tied
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], np.arange(40).reshape(5, 8))
    np.testing.assert_array_equal(tensors["model.layers.1.input_layernorm.weight"], 40 + 8 + np.arange(8))
    # Head size 4: rows 0, 2 of each head are the first halves of its two pairs.
    query = (56 + np.arange(64)).reshape(8, 8)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.weight"], query[[0, 2, 1, 3, 4, 6, 5, 7]])
    end = count - 16 - (0 if tied else 40)
    np.testing.assert_array_equal(tensors["model.norm.weight"], end - 8 + np.arange(8))
    if not tied:
        np.testing.assert_array_equal(tensors["lm_head.weight"].ravel(), count - 40 + np.arange(40))


def test_damaged_files(tmp_path):
    path = tmp_path / "model.bin"
    for more, message in [(b"\0" * 4, "its sizes ask for .* bytes of"), (b"\0", "is no llama2.c model: it has")]:
        write(path, tied=True, more=more)
        with pytest.raises(ValueError, match=message):
            open_llama2c(path)
    path.write_bytes(struct.pack("<7i", 8, 6, 2, 3, 1, 5, 4) + b"\0" * 100)
    with pytest.raises(ValueError, match=r"is no llama2\.c model: its sizes are \[8, 6, 2, 3"):
        open_llama2c(path)
    path.write_bytes(struct.pack("<ifi3s", 3, 0.0, 3, b"abc") + b"\0\0")
    with pytest.raises(ValueError, match="is truncated after 1 tokens"):
        read_llama2c_tokenizer(path)
    path.write_bytes(struct.pack("<ifi3s", 3, 0.0, 3, b"abc"))
    with pytest.raises(ValueError, match="has 1 tokens, fewer than"):
        read_llama2c_tokenizer(path)


def test_greedy_story():
    pytest.importorskip("tokenizers", reason="needs the models extra")
    try:
        folder = resolve("stories260k")
    except ValueError as error:
        pytest.skip(str(error))
    model = load("stories260k")
    tokenizer = model.tokenizer
    prompt = tokenizer.encode("Once upon a time")
    assert prompt == [1, 403, 407, 261, 378]
    story = generate(
        model.config, model.params, np.asarray([prompt], np.int32), key=jax.random.key(0), max_new_tokens=192
    )
    golden = (folder / "golden_greedy.txt").read_text(encoding="utf-8").removesuffix("\n")
    told = "Once upon a time" + "".join(tokenizer.stream(story.tokens[0], before=prompt))
    assert len(told) > 400
    assert golden.startswith(told)
    # The same pieces when the told text is cut again.
    assert tokenizer.encode(told)[: len(prompt) + 100] == [*prompt, *np.asarray(story.tokens[0, :100]).tolist()]
