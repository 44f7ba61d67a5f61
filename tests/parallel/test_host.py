"""A host without TPUs answers the TPU library's questions before they are asked."""

import os

from dflash.parallel import host


def test_without_chips_the_library_is_told_what_it_would_ask(monkeypatch, tmp_path):
    for name in host.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    chip = tmp_path / "accel0"
    monkeypatch.setattr(host.pathlib, "Path", lambda _: tmp_path)
    chip.touch()
    host.quiet_without_tpu()
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
    chip.unlink()
    host.quiet_without_tpu()
    assert {name: os.environ[name] for name in host.ENVIRONMENT} == {
        **host.ENVIRONMENT,
        "TPU_WORKER_ID": "7",  # what is set stays
    }
    for name in host.ENVIRONMENT:
        monkeypatch.delenv(name)
