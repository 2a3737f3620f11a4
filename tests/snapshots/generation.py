"""Rows of data sets whose tasks generate text, and score it. What was guessed is said at the rows."""

from __future__ import annotations

from tests.snapshots.table import Row, Rows

SUMS = [
    ("Anna has {a} pens and buys {b} more. How many pens has she now?", 3, 4),
    ("Ben reads {a} pages today and {b} tomorrow. How many pages are that?", 12, 30),
]


def gpqa(question: str, choices: list[str], answer: int) -> Row:
    wrong = [choice for i, choice in enumerate(choices) if i != answer]
    found = {f"Incorrect Answer {i}": choice for i, choice in enumerate(wrong, 1)}
    return (
        {"Question": question, "Correct Answer": choices[answer]} | found | {"Subdomain": "Physics (general)"}
    )


def gsm8k(subset: str, split: str) -> Rows:
    return [
        {"question": text.format(a=a, b=b), "answer": f"{a} and {b} make {a + b}.\n#### {a + b}"}
        for text, a, b in SUMS
    ]


def gsm8k_platinum(subset: str, split: str) -> Rows:
    return [row | {"cleaning_status": "consensus"} for row in gsm8k(subset, split)]


def mgsm(subset: str, split: str) -> Rows:
    """Answers in words are in the training split alone, as published. `equation_solution`: null in the test
    split (guessed)."""
    return [
        {
            "question": ("Frage: " if split == "train" else "") + text.format(a=a, b=b),
            "answer": f"Schritt-für-Schritt-Antwort: {a} + {b}. Die Antwort lautet {a + b}."
            if split == "train"
            else None,
            "answer_number": a + b,
            "equation_solution": f"{a} + {b} = {a + b}." if split == "train" else None,
        }
        for text, a, b in SUMS
    ]


def drop(subset: str, split: str) -> Rows:
    """Numbers, spans and a date; six, since five are drawn as examples."""
    day = {"day": "", "month": "", "year": ""}
    answers = [
        ("7", [], day),
        ("", ["the visitors"], day),
        ("", [], {"day": "2", "month": "May", "year": "1995"}),
        ("3", [], day),
        ("", ["Bern", "Basel"], day),
        ("4", [], day),
    ]
    return [
        {
            "section_id": "nfl_1",
            "query_id": f"q{i}",
            "passage": "The visitors came from Bern and Basel on 2 May 1995. They won by 7 to 3.",
            "question": f"What is answer {i}?",
            "answer": {"number": number, "date": date, "spans": spans, "worker_id": "", "hit_id": ""},
            "validated_answers": {
                "number": [number],
                "date": [date],
                "spans": [spans],
                "worker_id": [""],
                "hit_id": [""],
            },
        }
        for i, (number, spans, date) in enumerate(answers)
    ]


def hendrycks_math(subset: str, split: str) -> Rows:
    """Eight, since six are drawn as examples."""
    return [
        {
            "problem": f"What is ${i} + {i}$?",
            "level": "Level 1",
            "type": subset,
            "solution": f"We add: $\\boxed{{{2 * i}}}$.",
        }
        for i in range(1, 9)
    ]


def ifeval(subset: str, split: str) -> Rows:
    """`kwargs` has all keys of all instructions in the data set, here those of four; unused ones are null."""
    one = [
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"relation": "at least", "num_words": 3}),
        ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 4}),
        ("language:response_language", {"language": "de"}),
    ]
    empty = {"relation": None, "num_words": None, "num_sentences": None, "language": None}
    return [
        {
            "key": 1000 + i,
            "prompt": f"Write about the sea, as {name} asks.",
            "instruction_id_list": [name],
            "kwargs": [empty | stated],
        }
        for i, (name, stated) in enumerate(one)
    ]


def acp(subset: str, split: str) -> Rows:
    """Yes or no, or a letter with its options; columns by the data set's card."""
    shared = {"group": "applicable_actions", "context": "This is a ferry domain. The ferry is at l1."}
    if subset.endswith("_bool"):
        return [
            {"id": i} | shared | {"question": f"Is l{i} empty?", "answer": ("yes", "no")[i]} for i in range(2)
        ]
    labelled = {"text": ["sail from l1 to l0", "board c0", "debark c0", "wait"], "label": list("ABCD")}
    question = "Which action is applicable? A. sail from l1 to l0. B. board c0. C. debark c0. D. wait."
    return [
        {"id": f"{i}", "query": question, "question": question, "choices": labelled, "answer": "AB"[i]}
        | shared
        for i in range(2)
    ]


def toxicity(subset: str, split: str) -> Rows:
    scores = dict.fromkeys(("severe_toxicity", "profanity", "threat", "insult", "flirtation"))
    return [
        {
            "filename": "0.txt",
            "begin": 0,
            "end": 60,
            "challenging": False,
            "prompt": {"text": text, "toxicity": 0.1} | scores,
            "continuation": {"text": " was the weather.", "toxicity": 0.1} | scores,
        }
        for text in ("All that they talked about", "The worst of that day")
    ]


def toxigen(subset: str, split: str) -> Rows:
    """Further columns of the data set (framing, lewd, ...) are left out; no task uses them."""
    return [
        {"text": text, "target_group": "neighbours", "toxicity_ai": ai, "toxicity_human": human}
        for text, ai, human in (("they sing in the evening", 1.0, 1.0), ("they ruin everything", 4.0, 4.5))
    ]


def humaneval(subset: str, split: str) -> Rows:
    return [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def add_{i}(a):\n    """Adds {i}."""\n',
            "canonical_solution": f"    return a + {i}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {1 + i}\n",
            "entry_point": f"add_{i}",
        }
        for i in range(2)
    ]


def mbpp(subset: str, split: str) -> Rows:
    return [
        {
            "task_id": 11 + i,
            "text": f"Write a function to add {i}.",
            "code": f"def add(a):\n  return a + {i}",
            "test_list": [f"assert add({a}) == {a + i}" for a in range(3)],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for i in range(2)
    ]
