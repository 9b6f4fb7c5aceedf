"""The parts of the Llama example, without a process: text to windows, sizes, model, step log, verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torchmetrics.text import Perplexity as ReferencePerplexity
from transformers import PreTrainedTokenizerFast

from examples.llama.data import (
    END_OF_FILE,
    TextDataModule,
    TokenWindows,
    read_tokens,
    split_tokens,
    text_files,
)
from examples.llama.demo import News, summary
from examples.llama.model import LlamaModule, Perplexity, decay_groups, warmup_cosine
from examples.llama.recovery import recovery, split_runs
from examples.llama.sizes import SIZES, llama_config
from examples.llama.step_log import append_line, read_events
from examples.llama.train import parse_arguments
from lightning_resilience.faults.plan import PlannedFault


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with text in several files, an empty one among them, and some that must not be read."""
    for name, content in {
        "b.py": "bb",
        "a.py": "a",
        "empty.py": "",
        "sub/c.py": "ccc" * 100,
        "notes.txt": "not read",
        "tests/test_a.py": "not read",
        "site-packages/lib.py": "not read",
    }.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "text"


def test_files_come_in_one_order_and_skip_what_is_not_source(text: Path) -> None:
    names = [path.relative_to(text).as_posix() for path in text_files(text, "*.py")]
    assert names == ["a.py", "b.py", "empty.py", "sub/c.py"]


def test_every_file_ends_with_its_mark(text: Path) -> None:
    tokens = read_tokens(text, "*.py", limit_bytes=1000).tolist()
    assert tokens[:6] == [ord("a"), END_OF_FILE, ord("b"), ord("b"), END_OF_FILE, END_OF_FILE]
    assert tokens[-1] == END_OF_FILE


def test_reading_stops_at_the_limit(text: Path) -> None:
    tokens = read_tokens(text, "*.py", limit_bytes=2).tolist()
    assert tokens == [ord("a"), END_OF_FILE, ord("b"), END_OF_FILE]


def test_one_file_can_be_the_data(text: Path) -> None:
    assert len(read_tokens(text / "notes.txt", "*.py", limit_bytes=1000)) == len("not read") + 1


def test_no_text_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_tokens(tmp_path, "*.py", limit_bytes=1000)


def test_windows_overlap_by_the_shifted_target() -> None:
    windows = TokenWindows(torch.arange(10, dtype=torch.int16), seq_len=3)
    assert [windows[i].tolist() for i in range(len(windows))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert windows[0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[3]


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5])
def test_validation_follows_training_and_shares_no_window(fraction: float) -> None:
    tokens = torch.arange(101, dtype=torch.int16)
    train, validation = split_tokens(tokens, 10, fraction)
    everything = [window.tolist() for part in (train, validation) for window in (part[i] for i in range(len(part)))]
    assert everything == [list(range(start, start + 11)) for start in range(0, 100, 10)]
    assert len(validation) == max(1, int(10 * fraction))


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few"):
        split_tokens(torch.zeros(11), seq_len=10, validation_fraction=0.1)


def test_two_builds_of_the_same_data_are_equal(text: Path) -> None:
    first, second = (TextDataModule(str(text), seq_len=16, batch_size=2) for _ in range(2))
    for module in (first, second):
        module.setup("fit")
    pairs = zip(first.val_dataloader(), second.val_dataloader(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_standard_library_is_there_without_a_download() -> None:
    data = TextDataModule(limit_mb=0.05)
    data.setup("fit")
    assert next(iter(data.train_dataloader())).shape == (8, 129)


@pytest.mark.parametrize("size", SIZES)
def test_every_size_builds(size: Any) -> None:
    with torch.device("meta"):
        module = LlamaModule(size=size)
        module.configure_model()
    millions = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    expected = {"tiny": 1, "small": 24, "llama-3.2-1b": 1236, "llama-3.1-8b": 8030}
    assert millions == pytest.approx(expected[size], rel=0.05)


def test_byte_sizes_have_dropout_that_can_be_changed() -> None:
    assert llama_config("tiny").attention_dropout == 0.1
    assert llama_config("tiny", attention_dropout=0.0).attention_dropout == 0


def test_tiny_learns_something_in_a_step() -> None:
    torch.manual_seed(1)
    module = LlamaModule(attention_dropout=0.0)
    module.configure_model()
    network = module.model
    module.configure_model()
    assert module.model is network, "a second call must not throw the weights away"
    batch = torch.randint(0, 256, (2, 17))
    optimizer = torch.optim.AdamW(decay_groups(module.parameters(), 0.1), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = module.loss(batch)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(260), rel=0.05)
    assert losses[1] < losses[0]


def test_a_model_from_the_meta_device_starts_like_any_other() -> None:
    module, usual = LlamaModule(meta_init=True), LlamaModule()
    module.configure_model()
    usual.configure_model()
    assert all(parameter.is_meta for parameter in module.parameters())
    module.model.to_empty(device="cpu")
    for layer in module.model.modules():  # what a strategy does, layer by layer
        layer.reset_parameters()
    for (name, tensor), (_, expected) in zip(_tensors(module), _tensors(usual), strict=True):
        assert tensor.shape == expected.shape, name
        torch.testing.assert_close(tensor.float().std(), expected.float().std(), rtol=0.1, atol=1e-6, msg=name)
        torch.testing.assert_close(tensor.float().mean(), expected.float().mean(), rtol=0, atol=5e-3, msg=name)


def test_pretrained_weights_and_their_tokenizer(text: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "pretrained")
    original = LlamaModule()
    original.configure_model()
    original.model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "bb": 1, "<end>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer_class: Any = PreTrainedTokenizerFast  # its constructor has no types
    tokenizer_class(tokenizer_object=words, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    loaded = LlamaModule(pretrained=folder)
    with torch.device("meta"):  # as a strategy may ask
        loaded.configure_model()
    expected = dict(_tensors(original))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _tensors(loaded))
    assert read_tokens(text / "b.py", "*.py", 1000, tokenizer=folder).tolist() == [1, 2]


def _tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def test_only_matrices_decay() -> None:
    module = LlamaModule()
    module.configure_model()
    matrices, vectors = decay_groups(module.parameters(), 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert len(vectors["params"]) == 9, "two norms in each of four layers and one at the end"


def test_perplexity_is_that_of_torchmetrics() -> None:
    torch.manual_seed(1)
    ours, reference = Perplexity(), ReferencePerplexity()
    for rows in (1, 3):
        logits, targets = torch.randn(rows, 5, 11), torch.randint(0, 11, (rows, 5))
        reference.update(logits, targets)
        ours.update(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), weight=rows)
    torch.testing.assert_close(ours.compute(), reference.compute())


def test_learning_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    factors = [warmup_cosine(step, warmup_steps=4, total_steps=14, floor=0.1) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[9] == pytest.approx(0.55)
    assert factors[14:] == pytest.approx([0.1] * 6)


def test_a_logged_loss_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    loss = float(torch.tensor(1.0).div(3.0))
    append_line(tmp_path / "sub" / "log.jsonl", {"loss": loss})
    assert read_events(tmp_path / "sub" / "log.jsonl")[0]["loss"].hex() == loss.hex()


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"event": "step"}) + "\n" + '{"event": "st')
    assert read_events(log) == [{"event": "step"}]
    assert read_events(tmp_path / "none.jsonl") == []


def _run(start: int, losses: Sequence[float]) -> list[dict[str, Any]]:
    steps = [{"event": "step", "step": start + i, "time": start + i, "loss": loss} for i, loss in enumerate(losses, 1)]
    return [{"event": "start", "step": start, "time": start}, *steps]


SAVE = {"event": "save", "step": 2, "stall_s": 0.002, "error": None}
FAULT = {"event": "fault", "time": 2.1, "rank": 1, "step": 2, "kind": "hang", "place": "forward"}
KILLED = [*_run(0, [4.0, 3.0]), FAULT, *_run(2, [2.5])[1:], SAVE]


def _restarted(rank: int, time: float, step: int = 2, at_s: float = 2.4) -> dict[str, Any]:
    report = {"kind": "hang", "rank": 1, "step": step, "at_s": at_s}
    phases = {"unblock": 0.1, "restore": 0.2}
    return {"kind": "restarted", "rank": rank, "time": time, "number": 1, "faults": [report], "phases": phases}


RESTARTED = [_restarted(0, 2.9), _restarted(1, 2.8)]


def test_an_exact_resume_has_no_problem() -> None:
    result = recovery([*KILLED, *_run(2, [2.5, 2.0])], RESTARTED, steps=4)
    assert (result.killed_at, result.resumed_from, result.redone) == (3, 2, [3])
    assert result.stalls_ms == (2.0,)
    assert result.problems() == []


def test_a_restart_is_timed_from_the_fault_to_the_last_rank() -> None:
    (restart,) = recovery([*KILLED, *_run(2, [2.5, 2.0])], RESTARTED, steps=4).restarts
    assert (restart.kind, restart.rank, restart.step, restart.next_step, restart.redone) == ("hang", 1, 2, 3, 0)
    assert [restart.noticed_s, restart.recovered_s] == pytest.approx([0.3, 0.5])
    assert restart.phases == {"interrupt": pytest.approx(0.1), "unblock": 0.1, "restore": 0.2}


def test_the_table_has_a_column_for_each_fault() -> None:
    table = summary(recovery([*KILLED, *_run(2, [2.5, 2.0])], RESTARTED, steps=4))
    assert [column.header for column in table.columns] == ["", "hang\non rank 1", "SIGKILL\nto all"]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert ("steps done again", "0", "1") in rows
    assert ("  unblock", "100.0 ms", "") in rows


@pytest.mark.parametrize(
    ("events", "restarted", "problem"),
    [
        ([*KILLED, *_run(2, [2.500001, 2.0])], RESTARTED, "another loss"),
        ([*KILLED, *_run(0, [4.0, 3.0, 2.5, 2.0])], RESTARTED, "step 0"),
        ([*KILLED, *_run(2, [2.5])], RESTARTED, "to the end"),
        ([*_run(0, [4.0, 3.0]), SAVE, *_run(2, [2.5, 2.0])], [], "done twice"),
        ([*_run(0, [4.0, 3.0, 2.5]), *_run(2, [2.5, 2.0])], [], "no save"),
        ([*_run(0, [4.0, 3.0, 2.5]), SAVE | {"error": "disk full"}, *_run(2, [2.5, 2.0])], [], "failed"),
        ([*KILLED, *_run(2, [2.5, 2.0])], [], "1 faults were planned, 0 recovered"),
        ([*KILLED, *_run(2, [2.5, 2.0])], [_restarted(1, 2.8, step=1)], "1 faults were planned, 0 recovered"),
        ([*KILLED, *_run(2, [2.5, 2.0])], [_restarted(1, 2.8, at_s=102.4)], "before it was noticed"),
        ([*KILLED, *_run(2, [2.5, 2.0])], [_restarted(1, 2.8, at_s=0.3)], "before it happened"),
        ([*KILLED, *_run(3, [2.0])], RESTARTED, "only with a fault"),
        ([*_run(0, [4.0, 3.0]), *_run(1, [3.0, 2.5])[1:], SAVE, *_run(2, [2.5, 2.0])], [], "did some twice"),
    ],
)
def test_what_is_not_as_promised_is_named(
    events: list[dict[str, Any]], restarted: list[dict[str, Any]], problem: str
) -> None:
    assert any(problem in text for text in recovery(events, restarted, steps=4).problems())


def test_a_log_without_a_second_run_is_refused() -> None:
    with pytest.raises(ValueError, match="two runs"):
        recovery(_run(0, [1.0]), [], steps=4)
    assert len(split_runs([*_run(0, [1.0]), *_run(1, [1.0])])) == 2


def test_lines_of_logs_are_news_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    append_line(first, {"event": "old", "time": 0})
    news = News(first, second)
    append_line(first, {"event": "late", "time": 2})
    append_line(second, {"event": "early", "time": 1})
    assert [event["event"] for event in news.read()] == ["early", "late"]
    assert news.read() == []


def test_a_drill_is_an_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_arguments(["--fault", "raise:backward:rank=1:step=33", "--fault", "hang:forward"])
    assert options.fault == [
        PlannedFault(kind="raise", place="backward", rank=1, step=33),
        PlannedFault(kind="hang", place="forward"),
    ]
    assert parse_arguments([]).fault == []
    for wrong, said in {"rise:forward": "kind='rise'", "raise:forward:node=1": "no node", "hang": "place=''"}.items():
        with pytest.raises(SystemExit):
            parse_arguments(["--fault", wrong])
        assert said in capsys.readouterr().err
