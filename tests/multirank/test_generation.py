"""Generation on two ranks with two expert-parallel places, where sequences end at different tokens on each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_hybrid
from ds_hybrid.hf.trainer import engine_of
from tests.multirank.models import make_model
from tests.multirank.test_accelerate import ds_config, make_accelerator
from tests.multirank.trainers import Script, forget_accelerate, sequences
from tests.ranks import RankPool

MOST = 8
"""New tokens at most."""


def test_generate(two_ranks: RankPool) -> None:
    """With ``synced_gpus`` the rank that is done goes on calling experts until the other is."""
    prompts, end, expected = sequences_of_one_process()
    assert len(expected[0]) < len(expected[1])
    outcomes = two_ranks.run(generate, prompts, end)
    assert outcomes == expected


def test_predict_with_generate(two_ranks: RankPool, tmp_path: Path) -> None:
    prompts, end, expected = sequences_of_one_process()
    for predictions in two_ranks.run(predict, Script(str(tmp_path)), prompts, end):
        assert predictions == [[*prompts[row].tolist(), *answered] for row, answered in enumerate(expected)]


def sequences_of_one_process() -> tuple[Tensor, int, list[list[int]]]:
    """A prompt for each rank; a token that ends the first one's answer early; both answers."""
    prompts = torch.stack([row["input_ids"][:4] for row in sequences(2)])
    model: Any = make_model("mixtral").eval()
    first, second = (answer(model, prompt, end=None) for prompt in prompts)
    end = next(token for token in first[1:4] if token not in second)
    return prompts, end, [answer(model, prompt, end=end) for prompt in prompts]


def answer(model: Any, prompt: Tensor, *, end: int | None, **options: Any) -> list[int]:
    generated: Tensor = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=MOST,
        eos_token_id=end,
        pad_token_id=0,
        **options,
    )
    return generated[0, len(prompt) :].tolist()


def generate(prompts: Tensor, end: int) -> list[int]:
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(0))
        engine = accelerator.prepare(make_model("mixtral"))
        engine.eval()
        model = accelerator.unwrap_model(engine)
        generated = answer(model, prompts[accelerator.process_index], end=end, synced_gpus=True)
    engine.destroy()
    return generated


def predict(script: Script, prompts: Tensor, end: int) -> list[list[int]]:
    """Both ranks' predictions, without padding, by a Trainer that has not moved the weights."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator

    forget_accelerate()
    arguments = Seq2SeqTrainingArguments(
        output_dir=script.folder,
        deepspeed=script.ds_config(),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        max_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        predict_with_generate=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model: Any = make_model("mixtral")
    model.config.pad_token_id = 0
    with ds_hybrid.use_with_accelerate():
        trainer = Seq2SeqTrainer(
            model=model, args=arguments, train_dataset=sequences(64), data_collator=default_data_collator
        )
        trainer.train()
        rows = [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in prompts]
        predicted = trainer.predict(
            rows, synced_gpus=True, do_sample=False, max_new_tokens=MOST, eos_token_id=end, pad_token_id=0
        ).predictions
    engine_of(trainer).destroy()
    rows_of_tokens: list[list[int]] = [row.tolist() for row in predicted]
    longest = prompts.shape[1] + MOST
    return [row[: row.index(end) + 1] if end in row else row[:longest] for row in rows_of_tokens]
