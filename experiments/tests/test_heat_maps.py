import pytest
from matplotlib import image

from dflash.config import sweep_points
from experiments import heat_maps

CONFIG = """
base: [random_tiny_dflash.yml]
sweep: {product: {decode.seed: [1, 2, 3], decode.top_k: [10, 20]}}
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "s.yml").write_text(CONFIG)
    return lambda *overrides: sweep_points.load(tmp_path / "s.yml", overrides)


def rows_of(sweep):
    rows = {}
    for name, point in sweep.points.items():
        total = sum(point.values.values())
        half = None if point.values["decode.seed"] == 1 else total / 2
        rows[name] = {"sum": total, "half": half}
    return rows


def test_there_is_a_cell_for_every_point(load):
    sweep = load()
    rows = rows_of(sweep)
    assert heat_maps.panels_of(sweep, "sum", rows) == {"": [[11, 21], [12, 22], [13, 23]]}
    halves = heat_maps.panels_of(sweep, "half", rows)
    assert halves == {"": [[None, None], [6.0, 11.0], [6.5, 11.5]]}
    cube = load("sweep.zip.decode.batch_size=[1, 2]", "sweep.zip.decode.sync_every=[3, 4]")
    assert set(heat_maps.panels_of(cube, "sum", {})) == {
        "decode.batch_size=1, decode.sync_every=3",
        "decode.batch_size=2, decode.sync_every=4",
    }
    line = load("sweep.product.decode.top_k=[7]")
    assert heat_maps.panels_of(line, "sum", {}) == {"": [[None], [None], [None]]}


def test_a_heat_map_is_a_picture(load, tmp_path):
    sweep = load()
    (path,) = heat_maps.draw_all(sweep, ["sum", "none"], rows_of(sweep), tmp_path)
    assert path == tmp_path / "sum.png"
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 100
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::7]}) > 10
