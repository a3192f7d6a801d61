"""A tiny BERT, built from a configuration without downloads, with Hugging Face's Trainer.

penstock run --seed 0 examples/transformers_trainer.py output
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    """Sentences with words dropped at random, as for a denoiser."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict:
        words = (torch.arange(12) * (index + 3)) % 50 + 1
        words[torch.rand(12) < 0.2] = 0
        words[0] = index
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


if __name__ == "__main__":
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    arguments = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "output",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=int(sys.argv[2]) if len(sys.argv) > 2 else 2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model, order = BertForSequenceClassification(config), []

    def note_order(module, args, inputs):
        order.extend(inputs["input_ids"][:, 0].tolist())

    model.register_forward_pre_hook(note_order, with_kwargs=True)
    trainer = Trainer(model, arguments, train_dataset=Sentences())
    print("loss", trainer.train().training_loss)
    print("order", order)
