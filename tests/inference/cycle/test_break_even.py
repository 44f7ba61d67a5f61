import jax.numpy as jnp
import numpy as np
import pytest

from dflash.inference.cycle import break_even
from dflash.inference.cycle.choices import Division


@pytest.mark.parametrize(("cost", "most"), [(1.8, 4), (2.0, 3), (2.3, 2), (2.6, 2), (2.8, 0)])
def test_how_many_sequences_drafting_pays_for(cost, most):
    """Each of two replicas divides two drafts: one sequence commits 2.71 tokens, two 1.9 each."""
    seconds = jnp.array([1.0, np.inf, np.inf, cost])
    likely = break_even.hopeful((1, 2, 3))
    found = break_even.pays(seconds, likely, 4, (1, 2, 3), Division((2,), 2))
    assert found.tolist() == [number <= most for number in (1, 2, 3, 4)]
