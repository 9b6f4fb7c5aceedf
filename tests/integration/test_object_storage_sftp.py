"""Training whose checkpoints lie on a file server: written by two ranks, gone on from, looked at, cleared away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience.cli.main import main
from tests.integration.bucket_fits import FIRST, SHORT
from tests.integration.ranks import Stem
from tests.servers.sftp import PASSWORD, SftpServer


def command(capsys: pytest.CaptureFixture[str], sftp: SftpServer, name: str) -> Any:
    options = [f"--storage-option={key}={json.dumps(value)}" for key, value in sftp.options.items()]
    code = main(["checkpoints", name, f"{sftp.url}/run", *options, "--json"])
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    return code, {item["path"].rpartition("/")[2]: item for item in found}


def test_sharded_checkpoints_on_a_file_server(
    stem: Stem, sftp: SftpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem.load("tests.integration.bucket_fits")
    output = stem.run(
        "tests.integration.bucket_fits:main",
        str(tmp_path),
        sftp.url,
        json.dumps(sftp.options),
        "on_a_file_server",
        ranks=2,
        folder=tmp_path,
    )
    found = json.loads((tmp_path / "results.json").read_text())["on_a_file_server"]
    assert "error" not in found, found["error"] + output[-5000:]
    whole, first, last = found["whole"], found["first"], found["last"]
    assert last["resumed"] == f"{sftp.url}/run/last.ckpt" == first["last"]
    assert sorted(map(int, last["losses"])) == list(range(FIRST, SHORT + 1))
    assert {**first["losses"], **last["losses"]} == whole["losses"]
    assert last["weights"] == whole["weights"]

    code, listed = command(capsys, sftp, "list")
    newest = f"step={SHORT - 1}.ckpt"
    assert code == 0
    assert set(listed) == {newest, "last.ckpt"}  # of step 2 nothing is left
    assert {(item["step"], item["state"], item["ranks"]) for item in listed.values()} == {(SHORT - 1, "committed", 2)}
    code, verified = command(capsys, sftp, "verify")
    assert code == 0
    assert all(item["whole"] and item["checksums"] for item in verified.values())
    assert {path.name for path in (sftp.root / "run").iterdir()} == set(listed)  # and nothing besides
    assert PASSWORD not in output

    part = next((sftp.root / "run" / newest).rglob("__1_0.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    code, verified = command(capsys, sftp, "verify")
    assert code == 1
    assert [name for name, item in verified.items() if not item["whole"]] == [newest]
