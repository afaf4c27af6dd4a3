"""The words of the problems; every one of them is a single token of the tiny tokenizer."""

NAMES = ("Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Ida", "Max", "Zoe", "Kim", "Jon")
ITEMS = ("apples", "pears", "plums", "cards", "books", "pens", "cups", "eggs", "shells", "stamps", "keys", "balls")

GOODS = (
    *("rice", "milk", "salt", "flour", "sugar", "tea", "corn", "oats", "beans", "wool", "silk", "soap"),
    *("wax", "hay", "seed", "honey", "jam", "cheese", "bread", "cocoa", "butter", "pepper", "coffee", "cotton"),
)  # fmt: skip
METALS = ("iron", "gold", "lead", "zinc", "tin", "clay", "coal", "brass", "steel", "glass", "silver", "copper")

PLACES = ("river", "market", "school", "garden", "station", "bridge", "harbor", "tower", "park", "library")
THINGS = ("tree", "house", "boat", "dog", "door", "bird", "cat", "wall")
ADJECTIVES = ("old", "small", "green", "quiet", "bright", "tall")

GRAMMAR = (
    *("The", "price", "weight", "of", "is", "has", "finds", "more", "gives", "away", "How", "many", "does", "have"),
    *("bags", "bars", "with", "each", "much", "pay", "for", "heavy", "are", "walks", "to", "the", "looks", "at", "a"),
    *("talks", "about", "wind", "blows", "over", "sits", "near", "Question", "Answer", "####", "and", "in", "it"),
)  # fmt: skip

OPERATORS = ("+", "-", "*", "=")

LARGEST_NUMBER = 119


def all_words() -> list[str]:
    """Every word of the problems, in a fixed order."""
    return [*GRAMMAR, *OPERATORS, *NAMES, *ITEMS, *GOODS, *METALS, *PLACES, *THINGS, *ADJECTIVES]
