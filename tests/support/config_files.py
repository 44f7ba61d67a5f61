"""What the tests of the config loader share: the least of a config, and what is wrong with one."""

import pytest

from dflash import errors
from dflash.config import loader

MINIMAL = "target: {checkpoint: weights}\n"


def problems(path, *overrides, **kwargs):
    with pytest.raises(errors.ConfigError) as caught:
        loader.load(path, overrides, **kwargs)
    return list(caught.value.problems)
