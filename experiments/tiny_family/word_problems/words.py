"""Names and nouns that fill the templates of word problems."""

import random

NAMES = (
    "Ada Alan Amir Anna Ben Carla Chen Dana David Elena Emil Emma Farid Fatima George Grace Hana "
    "Hugo Ida Ivan James Jin Julia Kai Kofi Lara Leo Lina Lucas Maria Maya Mia Milan Nadia Nina "
    "Noah Olga Omar Oscar Paula Peter Priya Quinn Rosa Ruth Sam Sara Sofia Tariq Theo Tom Uma Vera "
    "Victor Wei Yara Yuki Zoe"
).split()
THINGS = (
    "apples badges balls beads books bottles bowls brushes buttons cakes candles cards chairs cups "
    "erasers flags flowers folders hats jars keys lamps lemons maps marbles masks mugs notebooks "
    "oranges pears pencils pens plates posters puzzles ribbons rulers scarves shells shirts spoons "
    "stamps stickers tickets tiles toys tulips vases"
).split()
CONTAINERS = "bags baskets boxes cartons cases crates packs trays".split()
PLACES = (
    "bakery bookshop cinema clinic club factory farm garden hotel kitchen library market museum "
    "school shop station studio theatre workshop zoo"
).split()
NUM_PEOPLE = 5  # one per piece of a problem


def draw(rng: random.Random) -> dict[str, str]:
    """Draws the words of a problem: people {p0} to {p4}, two kinds of things, and others."""
    people = rng.sample(NAMES, NUM_PEOPLE)
    things, items = rng.sample(THINGS, 2)
    return {
        **{f"p{index}": person for index, person in enumerate(people)},
        "things": things,
        "items": items,
        "containers": rng.choice(CONTAINERS),
        "place": rng.choice(PLACES),
    }
