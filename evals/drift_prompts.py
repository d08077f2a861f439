"""The fixed prompts of the drift tripwires, ours: 45 short ones and 15 long ones, of many kinds.

They are read in this order, short ones first. A change here makes every kept reference useless.
"""

from __future__ import annotations

SHORT: tuple[str, ...] = (
    "Name the season that comes after winter.",
    "What do bees make?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' to French.",
    "What is 17 plus 25?",
    "Give me three words that rhyme with light.",
    "Which is heavier, a kilogram of iron or a kilogram of wool?",
    "What is the opposite of generous?",
    "Continue: one, two, three, four,",
    "Who wrote Romeo and Juliet?",
    "Explain in one sentence what a thermometer does.",
    "Is a whale a fish?",
    "Write a short title for a story about a lost key.",
    "What is the plural of mouse?",
    "List two fruits that are yellow.",
    "Spell the word 'rhythm' backwards.",
    "What colour do you get when you mix blue and yellow?",
    "In which direction does the sun set?",
    "Write a Python line that prints the numbers from 1 to 5.",
    "What is 9 times 8?",
    "Correct the sentence: She go to school every day.",
    "What does a carpenter work with?",
    "Name a planet larger than the Earth.",
    "Answer yes or no: can ice float on water?",
    "Give a polite way to refuse an invitation.",
    "What is the capital city of Japan?",
    "Finish the proverb: The early bird",
    "How do you say thank you in Spanish?",
    "Which month has the fewest days?",
    "What is the past tense of 'to bring'?",
    "Write the JSON of a person called Ada who is 36.",
    "Why do leaves fall in autumn?",
    "What is half of 90?",
    "Describe an apple to someone who has never seen one.",
    "Name the tool that is used to drive a nail.",
    "What comes next: Monday, Wednesday, Friday,",
    "Is 21 a prime number?",
    "Make a question of this: The train leaves at noon.",
    "What do you call a baby sheep?",
    "Write a greeting for a birthday card.",
    "What is the boiling point of water in degrees Celsius?",
    "Sort these words by the alphabet: pear, apple, fig.",
    "What is the main language of Brazil?",
    "Say in five words why sleep matters.",
)

_NOTES = (
    (
        "The harbour office keeps a list of each boat that enters. On Monday eleven fishing boats came in before dawn, "
        "and two of them had torn nets. On Tuesday the fog was so thick that nobody left the quay until noon."
    ),
    (
        "Our village library opens at nine and closes at five. Children may take three books home, adults six. "
        "Whoever returns a book late pays nothing, but has to shelve ten others before leaving."
    ),
    (
        "The orchard has forty apple trees, twelve pear trees and a single old walnut. In a dry year the walnut gives "
        "more than all the pears together. The owner waters the young trees by hand every second evening."
    ),
    (
        "A bakery in the side street sells bread until it runs out. The first loaves leave the oven at half past five. "
        "By eight there is a queue, and by ten only rolls with seeds are left for those who come late."
    ),
    (
        "The old railway bridge was closed after the spring flood. Engineers measured the pillars for weeks, found "
        "one that had sunk by four centimetres, and asked for money to lift it before the autumn."
    ),
)
_TASKS = (
    "Sum up the notes above in one sentence.",
    "Which of the notes mentions a number of days or times? Answer in a few words.",
    "Write one question that a careful reader of the notes could ask.",
)


def _long(task: int, first: int) -> str:
    order = [_NOTES[(first + offset) % len(_NOTES)] for offset in range(len(_NOTES))]
    return "\n\n".join([*order, _TASKS[task]])


LONG: tuple[str, ...] = tuple(_long(task, first) for task in range(len(_TASKS)) for first in range(len(_NOTES)))
