"""The directory of a benchmark, and the rows of its tables."""

import pytest

from dflash import errors
from dflash.config import schema
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure import results

CONFIG = BenchmarkRun(target=schema.TargetConfig(checkpoint="weights"), tasks=("math",))
OTHER = BenchmarkRun(target=schema.TargetConfig(checkpoint="weights"), tasks=("code",))


@pytest.mark.parametrize("name", [results.RESULTS, results.STUDY])
def test_results_and_studies_belong_to_their_config(tmp_path, name):
    with results.open_directory(tmp_path, OTHER) as directory:
        directory.write("results.csv", "")
    with results.open_directory(tmp_path, CONFIG) as directory:  # nothing was measured there yet
        directory.write_json(name, {"x": 1})
    with pytest.raises(errors.WorkdirError, match=r"another config \(tasks: "):
        results.open_directory(tmp_path, OTHER)
    results.open_directory(tmp_path, CONFIG).close()


def test_a_table_has_a_header_and_unix_lines():
    assert results.table_csv([{"a": 1, "b": None}, {"a": 2.5, "b": "x"}]) == "a,b\n1,\n2.5,x\n"
    assert results.table_csv([]) == ""
