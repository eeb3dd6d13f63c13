"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import jax
import numpy as np

from jaxpost import hub
from jaxpost.data import tokenizers

README = Path(__file__).parent.parent / "README.md"
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def test_the_research_code_runs(tmp_path, monkeypatch):
    """A fresh model knows nothing: its loss is that of a uniform guess."""
    monkeypatch.chdir(tmp_path)
    files = tokenizers.byte_tokenizer()
    hub.save_model("start", *hub.init_model(TINY, jax.random.key(0), files=files))
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert code.count('"path/or/hub-id"') == 1
    names = {}
    exec(code.replace('"path/or/hub-id"', repr("start")), names)
    assert names["state"].step == 1
    _, saved = hub.load_model("my_model")
    np.testing.assert_array_equal(saved["embedding"], names["state"].params["embedding"])
    np.testing.assert_allclose(names["metrics"]["loss"], np.log(300), rtol=0.02)
    np.testing.assert_allclose(names["metrics"]["mean_logp"], -np.log(300), rtol=0.02)
