import os

import pytest

from dflash.kernels import library_cpu
from dflash.runs import cpu_kernels


def register(monkeypatch, **environment):
    """Registers the kernel as in a new process with these variables."""
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return library_cpu._register.__wrapped__()


def test_it_can_be_turned_off(monkeypatch):
    assert not register(monkeypatch, DFLASH_CPU_KERNELS="off")


def test_a_compiler_that_fails_costs_a_line(monkeypatch, tmp_path, capfd):
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\necho 'noise' >&2; echo 'x.cc:1: error: no header' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    kernels = tmp_path / "kernels"
    assert not register(monkeypatch, CXX=compiler, DFLASH_CPU_KERNELS=kernels)
    begun, problem = capfd.readouterr().err.splitlines()
    assert begun == "compiling CPU kernels, once …"
    assert problem == "CPU kernels off: x.cc:1: error: no header"
    assert not list(kernels.iterdir())


@pytest.mark.skipif(cpu_kernels.find_compiler() is None, reason="needs a C++ compiler")
def test_others_must_not_write_to_its_directory(monkeypatch, tmp_path, capfd):
    tmp_path.chmod(0o777)
    assert not register(monkeypatch, DFLASH_CPU_KERNELS=tmp_path)
    assert f"CPU kernels off: {tmp_path}: other users may write to it" in capfd.readouterr().err
    assert not os.listdir(tmp_path)
