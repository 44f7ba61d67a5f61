"""Measures data streams: the cost of a large corpus on a host, and grain next to our own order.

    python tools/measure_data.py large --tokens=1000000000    # 4 GB of temporary files
    python tools/measure_data.py grain --tokens=10000000      # needs grain, tensorflow-datasets

`large` writes a corpus of random documents; new processes open it, pack it and read batches.
`grain` stores the same documents as a tfds source, and packs them by grain's transformations.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dflash.data import corpus as corpora
from dflash.data import packing
from dflash.data.batches import Batches
from dflash.data.mixture import Mixture

LENGTH, BATCH_SIZE, BATCHES = 2048, 8, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["large", "grain", "read"])
    parser.add_argument("--tokens", type=int, default=10**7)
    parser.add_argument("--mean_length", type=int, default=500, help="mean tokens per document")
    parser.add_argument("--directory", type=pathlib.Path, help="directory for temporary files")
    given = parser.parse_args()
    if given.what == "read":
        print(json.dumps(read(given.directory)))
        return
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        measure = {"large": measure_large, "grain": measure_grain}[given.what]
        measure(pathlib.Path(directory), given.tokens, given.mean_length)


def measure_large(directory: pathlib.Path, tokens: int, mean_length: int) -> None:
    """Prints the cost of a corpus for the first process, which packs it, and for the next one."""
    begin = time.perf_counter()
    corpora.write(directory / "corpus", documents(tokens, mean_length))
    size = sum(file.stat().st_size for file in (directory / "corpus").iterdir())
    print(f"written: {tokens:,} tokens, {size / 1e9:.2f} GB, {time.perf_counter() - begin:.0f} s")
    for which in ("first process, packs", "next process"):
        command = [sys.executable, __file__, "read", f"--directory={directory / 'corpus'}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"{which}: {done.stdout.strip()}")


def read(path: pathlib.Path) -> dict[str, float]:
    """Opens a corpus and reads batches, as a host does; returns seconds and megabytes by name."""
    before, begin = memory_mb("VmHWM"), time.perf_counter()
    corpus = corpora.open_stored(path, "random", "")
    opened = time.perf_counter()
    rows = packing.PackedRows(corpus, packing.open_packing(corpus, LENGTH))
    packed = time.perf_counter()
    source = Batches(Mixture((rows,), (1.0,)), batch_size=BATCH_SIZE)
    next(source)
    first = time.perf_counter()
    for _ in range(BATCHES):
        next(source)
    ended = time.perf_counter()
    found = {
        "documents": len(corpus),
        "rows": len(rows),
        "index_s": opened - begin,
        "packing_s": packed - opened,
        "first_batch_s": first - begin,
        "rows_per_s": BATCHES * BATCH_SIZE / (ended - first),
        "peak_mb": memory_mb("VmHWM"),
        "peak_mb_above_imports": memory_mb("VmHWM") - before,
        "filled_percent": 100 * np.mean(next(source)["segment_ids"] > 0),
    }
    return {name: round(float(value), 2) for name, value in found.items()}


def documents(tokens: int, mean_length: int) -> Iterator[np.ndarray]:
    """Yields random documents of 0.2 to 1.8 times a length, with a supervised second half."""
    generator = np.random.default_rng(0)
    left = tokens
    while left > 0:
        size = min(left, int(generator.integers(mean_length // 5, 9 * mean_length // 5)))
        document = generator.integers(0, 150_000, size, np.uint32)
        document[size // 2 :] |= corpora.SUPERVISED
        left -= size
        yield document


def measure_grain(directory: pathlib.Path, tokens: int, mean_length: int) -> None:
    """Prints the cost of the same rows by grain over a tfds source, and by our own order."""
    corpora.write(directory / "corpus", documents(tokens, mean_length))
    print("ours:", json.dumps(read(directory / "corpus")))
    print("importing grain:", *timed(lambda: __import__("grain"))[1:])
    import grain

    source = tfds_source(directory, tokens, mean_length)
    order = np.random.default_rng(0).integers(0, len(source), 2000).tolist()
    seconds = timed(lambda: [source[index] for index in order])[1]
    print(f"tfds data source: {len(order) / seconds:.0f} documents/s at random places")

    def pipeline(process: int, count: int):
        mine = grain.MapDataset.source(source).seed(0).shuffle().repeat()[process::count]
        packed = grain.experimental.FirstFitPackIterDataset(
            mine.to_iter_dataset(), length_struct={"tokens": LENGTH}, num_packing_bins=64
        )
        return iter(packed)

    one = pipeline(0, 1)
    first_s = timed(lambda: next(one))[1]
    rows, seconds, _ = timed(lambda: [next(one) for _ in range(BATCHES * BATCH_SIZE)])
    filled = 100 * np.mean([row["tokens_segment_ids"] > 0 for row in rows])
    print(
        f"grain: first row {first_s:.2f} s, {len(rows) / seconds:.0f} rows/s, {filled:.1f} % filled"
    )
    state, following = one.get_state(), next(one)["tokens"]
    for process, count in ((0, 1), (0, 2), (1, 2)):
        other = pipeline(process, count)
        other.set_state(state)
        same = np.array_equal(next(other)["tokens"], following)
        print(f"grain: resumed as process {process} of {count}: {'same' if same else 'other'} rows")
    corpus = corpora.open_stored(directory / "corpus", "random", "")
    compare_orders(grain, packing.PackedRows(corpus, packing.pack(corpus, LENGTH)))


def compare_orders(grain, rows: packing.PackedRows) -> None:
    """Compares orders of packed rows: grain shuffles, repeats and mixes their numbers."""
    shares, count = (0.7, 0.3), 20_000
    parts = [grain.MapDataset.range(len(rows)).shuffle(seed=seed).repeat() for seed in range(2)]
    mixed = grain.MapDataset.mix(parts, weights=shares)
    seconds = timed(lambda: [mixed[index] for index in range(count)])[1]
    print(f"grain: order alone, {count / seconds:.0f} rows/s")
    ours = Batches(Mixture((rows, rows), shares), batch_size=1)
    seconds = timed(lambda: [ours.draw() for _ in range(count)])[1]
    print(f"ours: order alone, {count / seconds:.0f} rows/s")


def tfds_source(directory: pathlib.Path, tokens: int, mean_length: int):
    import tensorflow_datasets as tfds

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        name = "random"
        code_path = None

        def _info(self):
            ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
            features = tfds.features.FeaturesDict({"tokens": ids})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for index, document in enumerate(documents(tokens, mean_length)):
                yield index, {"tokens": document.astype(np.int32)}

    builder = Builder(data_dir=directory, file_format="array_record")
    builder.download_and_prepare()
    builder = Builder(data_dir=directory, file_format="array_record")
    return builder.as_data_source("train")


def timed(do: Callable[[], object]) -> tuple:
    """Returns the result of a call, its seconds, and the memory that it added."""
    before, begin = memory_mb("VmRSS"), time.perf_counter()
    result = do()
    seconds = time.perf_counter() - begin
    return result, seconds, f"{memory_mb('VmRSS') - before:.0f} MB"


def memory_mb(kind: str) -> float:
    """Returns this process's resident memory in MB: current (VmRSS) or peak (VmHWM)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1e3


if __name__ == "__main__":
    main()
