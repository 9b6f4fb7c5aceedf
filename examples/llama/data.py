"""Text files as a byte-level language-model data set: no download, no tokenizer needed, ready in a second.

Every file of the chosen folder is read in a fixed order; the stream of tokens is cut in windows of
`seq_len + 1`; the last windows are the validation set. The same arguments give the same windows in every
process and on every start, which is what makes an exact resume possible.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

END_OF_FILE = 256
BYTE_VOCAB_SIZE = 260
"""256 bytes, the end of a file, and three numbers left free to make it a multiple of 4."""

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


def text_files(root: Path, pattern: str) -> Iterator[Path]:
    """Yield the files under `root` whose name matches `pattern`, always in the same order."""
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if fnmatch(name, pattern))


def read_tokens(root: Path, pattern: str, limit_bytes: int, tokenizer: str | None = None) -> Tensor:
    """Read text into one long row of token numbers.

    Args:
        root: a text file, or a folder that is searched with its sub-folders.
        pattern: which file names to read, as a shell pattern.
        limit_bytes: stop after this much text.
        tokenizer: folder of a Hugging Face tokenizer; without one every byte is a token.

    Raises:
        FileNotFoundError: no text was found.
    """
    encode = _byte_tokens if tokenizer is None else _HubTokenizer(tokenizer)
    parts: list[Tensor] = []
    left = limit_bytes
    for path in text_files(root, pattern):
        text = path.read_bytes()[:left]
        left -= len(text)
        parts.append(encode(text))
        if left <= 0:
            break
    if not parts:
        raise FileNotFoundError(f"no file that matches {pattern!r} under {root}: choose another --data or --pattern")
    return torch.cat(parts)


def _byte_tokens(text: bytes) -> Tensor:
    tokens = torch.empty(len(text) + 1, dtype=torch.int16)
    if text:  # torch.frombuffer refuses an empty buffer, and the standard library has empty files
        tokens[:-1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tokens[-1] = END_OF_FILE
    return tokens


class _HubTokenizer:
    """Token numbers from the tokenizer that belongs to a pretrained model."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: bytes) -> Tensor:
        numbers = self._tokenizer.encode(text.decode("utf-8", errors="replace"))
        return torch.tensor([*numbers, self._tokenizer.eos_token_id], dtype=torch.int32)


class TokenWindows(Dataset[Tensor]):
    """Item `i`: the `seq_len + 1` tokens that start at `i * seq_len`, inputs and shifted targets in one."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].long()


def split_tokens(tokens: Tensor, seq_len: int, validation_fraction: float) -> tuple[TokenWindows, TokenWindows]:
    """Cut the row in two: training windows, and after them at least one validation window.

    Raises:
        ValueError: there is not enough text for one window of each.
    """
    windows = len(TokenWindows(tokens, seq_len))
    if windows < 2:
        raise ValueError(f"{len(tokens)} tokens are too few for two windows of {seq_len}: give more text")
    cut = seq_len * (windows - max(1, int(windows * validation_fraction)))
    return TokenWindows(tokens[: cut + 1], seq_len), TokenWindows(tokens[cut:], seq_len)


class TextDataModule(LightningDataModule):
    """Training and validation windows of a text file or folder.

    Args:
        data: a text file or a folder; by default the Python standard library of the running interpreter.
        pattern: which file names to read in a folder.
        seq_len: tokens of one sample.
        batch_size: samples of one batch on one rank.
        validation_fraction: share of the windows, at the end of the text, kept for validation.
        limit_mb: how much text to read at most, in MB.
        num_workers: loader processes on each rank.
        tokenizer: folder of a Hugging Face tokenizer, for pretrained weights; default: bytes.
    """

    def __init__(
        self,
        data: str | None = None,
        pattern: str = "*.py",
        seq_len: int = 128,
        batch_size: int = 8,
        validation_fraction: float = 0.02,
        limit_mb: float = 16.0,
        num_workers: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.root = Path(data if data is not None else sysconfig.get_paths()["stdlib"])
        self.pattern = pattern
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.limit_bytes = int(limit_mb * 1e6)
        self.num_workers = num_workers
        self.tokenizer = tokenizer
        self._split: tuple[TokenWindows, TokenWindows] | None = None

    def setup(self, stage: str) -> None:
        """Read the text, once for all stages."""
        if self._split is None:
            tokens = read_tokens(self.root, self.pattern, self.limit_bytes, self.tokenizer)
            self._split = split_tokens(tokens, self.seq_len, self.validation_fraction)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(1, shuffle=False)

    def _loader(self, part: int, shuffle: bool) -> DataLoader[Tensor]:
        assert self._split is not None, "setup() comes first"
        return DataLoader(
            self._split[part],
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
