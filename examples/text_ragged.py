"""Text sequences of different lengths, batched by length and padded to the longest in each batch.

python examples/text_ragged.py            # creates some sample sentences
python examples/text_ragged.py corpus.txt # one sentence per line
"""

import random
import sys
from pathlib import Path

import torch

import penstock

PAD = 0


class Sentences:
    """Bytes of lines, as numbers. Some are dropped at random, as augmentation."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = penstock.SharedList(
            line.encode() for line in lines
        )  # one copy for all workers
        self.lengths = [len(line.encode()) for line in lines]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([byte for byte in self.lines[i] if random.random() > 0.05] or [32])


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)


def made_up_lines(num_lines: int = 200) -> list[str]:
    generator = random.Random(0)
    words = ("water", "runs", "down", "the", "pipe", "and", "turns", "a", "wheel")
    return [
        " ".join(generator.choices(words, k=generator.randint(1, 20))) for _ in range(num_lines)
    ]


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines() if len(sys.argv) > 1 else made_up_lines()
    dataset = Sentences(lines)
    # At most 2,000 bytes per batch, including padding, so short sentences form large batches.
    batches = penstock.BucketedBatches(dataset.lengths, max_tokens=2_000, bucket_batches=1, seed=0)
    loader = penstock.DataLoader(
        dataset, batch_sampler=batches, collate_fn=pad, num_workers=2, seed=0
    )
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(256, 16, padding_idx=PAD), torch.nn.Linear(16, 256)
    optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()], lr=0.01)
    num_tokens = num_padded = 0
    for epoch in range(2):
        batches.set_epoch(epoch)
        for tokens in loader:
            logits = head(embed(tokens[:, :-1]))
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_tokens += int((tokens != PAD).sum())
            num_padded += int((tokens == PAD).sum())
    print(f"padding: {num_padded / (num_padded + num_tokens):.1%} of all positions")
    print(f"loss {loss.item():.4f}")
