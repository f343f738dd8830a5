"""The self-made model: comparing two engines' words proves something only if words depend on the cache."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.pools import run_python
from vllm_integration.tiny_model import NUM_BYTES, SHAPES, make_tiny_model


def test_model_of_same_seed_is_the_same_file_and_of_another_is_not(tmp_path: Path) -> None:
    first, second, third = (
        (make_tiny_model(tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((0, 0, 1))
    )
    assert first == second
    assert first != third


def test_model_sizes_given_by_name_land_in_configuration(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, layers=2, hidden=128, kv_heads=1, vocab=512)
    config = json.loads((path / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["num_key_value_heads"] == 1
    assert (config["vocab_size"], config["hidden_size"]) == (512, 128)


def test_model_vocabulary_without_room_for_words_raises_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab 256 is too small"):
        make_tiny_model(tmp_path, vocab=256)


def test_tokenizer_round_trips_any_text_and_gives_each_id_its_own_word(tiny_model_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    text = "Grüße, 世界! \t\n 0 🙂"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < NUM_BYTES
    assert tokenizer.get_vocab_size() == SHAPES["tiny"].vocab
    words = {tokenizer.decode([i]) for i in range(NUM_BYTES + 4, SHAPES["tiny"].vocab)}
    assert len(words) == SHAPES["tiny"].vocab - NUM_BYTES - 4


def test_help_describes_every_argument() -> None:
    done = run_python(
        "import sys; sys.argv[1:] = ['-h']; from vllm_integration import tiny_model as t; t.main()"
    )
    assert done.returncode == 0, done.stderr
    for argument in ("path", "{qwen3-0.6b,tiny}", "--seed SEED"):
        assert re.search(rf"^  {re.escape(argument)}\s+\w+ \w+", done.stdout, re.M), done.stdout
    assert done.stdout.count("default: ") == 2


@pytest.mark.vllm
def test_first_token_of_long_prompt_changes_what_the_model_says(run_engine) -> None:
    choose = random.Random(0)
    prompt = [choose.randrange(300, 2000) for _ in range(700)]
    changed = [prompt[0] + 1, *prompt[1:]]
    answer = run_engine(
        # a prefix that is taken from the cache is computed in other pieces, and bfloat16 shows it
        llm={"max_model_len": 1024, "max_num_seqs": 2, "enforce_eager": True, "enable_prefix_caching": False},
        steps=[{"do": "generate", "prompts": [p], "max_tokens": 48} for p in (prompt, changed, prompt)],
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    said, said_changed, said_again = (result[0] for result in answer["results"])
    assert said == said_again
    assert said["tokens"] != said_changed["tokens"]
    assert len(set(said["tokens"])) > 24
    assert min(said["tokens"]) >= NUM_BYTES + 4
