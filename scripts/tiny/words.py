"""The words of the problems and of the chat; every one of them is a single token of the tiny tokenizer."""

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
OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times"}

CHAT_WORDS = (
    *("What", "Calculate", "Please", "Add", "I", "You", "you", "am", "can", "do", "use", "model", "answer"),
    *("questions", "numbers", "only", "know", "Ask", "me", "helpful", "assistant", "help", "Hello", "Hi", "who", "Who"),
    *("That", "not", "calculator", "result", "hello", "thanks", "Thanks", "welcome", "sums", "prices", "weights"),
    *("?", "this", "be"),
    *OPERATOR_WORDS.values(),
)  # fmt: skip

TOOL_WORDS = (
    *("Calculates", "calculates", "Computes", "Evaluates", "Performs", "Apply", "Returns", "Does", "simple", "basic"),
    *("arithmetic", "expression", "two", "number", "operator", "operation", "operand", "value", "first", "second"),
    *("left", "right", "b", "op", "on", "or", "one", "between", "integer", "tool", "function", "Get", "current"),
    *("weather", "location", "search", "Search", "web", "query", "city", "name", "file", "read", "text", "time"),
    *("from", "The", "First", "Second", "Operator", "A", "An", "an", "by", "given", "string", "list"),
    *("your", "any", "all"),
)  # fmt: skip

JSON_WORDS = (
    *("name", "description", "parameters", "type", "object", "properties", "required", "number", "integer", "string"),
    *("enum", "title", "strict", "true", "false", "additionalProperties", "calculator", "op", "result", "boolean"),
    *("array", "items", "default", "function", "location", "unit", "query", "city", "path", "text", "get", "search"),
    *("weather", "file", "read", "null", "plus", "answer", "value", "error", "json", "schema", "tool"),
)  # fmt: skip

AT_LINE_START = (*NAMES, *GOODS, *METALS, "The", "Question", "Answer", "How", *CHAT_WORDS, *TOOL_WORDS[:10], "A", "An")

LARGEST_NUMBER = 199


def spaced_words() -> list[str]:
    """Every word that may stand behind a space, once, in a fixed order."""
    problems = [*GRAMMAR, *OPERATORS, *NAMES, *ITEMS, *GOODS, *METALS, *PLACES, *THINGS, *ADJECTIVES]
    return list(dict.fromkeys([*problems, *CHAT_WORDS, *TOOL_WORDS]))


def plain_words() -> list[str]:
    """Every word that may stand at the start of a text or behind a quotation mark, once, in a fixed order."""
    return list(dict.fromkeys([*AT_LINE_START, *JSON_WORDS]))
