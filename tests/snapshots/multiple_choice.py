"""Rows of data sets whose tasks compare the likelihoods of options. What was guessed is said at the rows."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.snapshots.table import Row, Rows, Table, always

# question, four options, index of the right one
FACTS: list[tuple[str, list[str], int]] = [
    ("Which river flows through Basel?", ["The Rhône", "The Rhine", "The Ticino", "The Inn"], 1),
    ("How many legs has a spider?", ["Four", "Six", "Eight", "Ten"], 2),
    ("Was steht auf einem Notenblatt?", ["Noten", "Preise", "Namen von Gästen", "Rezepte"], 0),
    ("Which of these is a prime number?", ["21", "27", "33", "37"], 3),
    ("水在什么温度下结冰？", ["零度", "十度", "五十度", "一百度"], 0),
    ("What does a thermometer measure?", ["Length", "Mass", "Temperature", "Time"], 2),
    ("Wie viele Kantone hat die Schweiz?", ["13", "20", "26", "30"], 2),
    ("Which planet is nearest to the sun?", ["Mercury", "Venus", "Mars", "Neptune"], 0),
]
UNKNOWN = "Not enough info"


def of_facts(row: Callable[[str, list[str], int], Row], n: int = 2) -> Table:
    """A row for each of the first n facts."""
    return always(*(row(*fact) for fact in FACTS[:n]))


def options(choices: list[str]) -> Row:
    return {f"option_{letter}": choice for letter, choice in zip("abcd", choices, strict=True)}


def mmlu(subset: str, split: str) -> Rows:
    return [{"question": q, "subject": subset, "choices": c, "answer": a} for q, c, a in FACTS[:5]]


def global_mmlu(subjects: list[str]) -> Table:
    """Two questions of each subject, since the tasks are filters of one table by subject."""
    # required_knowledge to cultural_sensitivity_label: guessed values, no task uses them
    more = {
        "required_knowledge": "[]",
        "time_sensitive": "[]",
        "reference": "[]",
        "culture": "[]",
        "region": "[]",
    }
    more |= {"country": "[]", "cultural_sensitivity_label": "-", "is_annotated": False}
    return always(
        *(
            {
                "sample_id": f"{subject}/test/{i}",
                "subject": subject,
                "subject_category": "STEM",
                "question": q,
            }
            | options(c)
            | {"answer": "ABCD"[a]}
            | more
            for subject in subjects
            for i, (q, c, a) in enumerate(FACTS[:2])
        )
    )


def include_44(subset: str, split: str) -> Rows:
    """Two questions of each domain that the German tasks filter by."""
    more = {"language": subset, "country": "Germany", "regional_feature": "agnostic", "level": "Academic"}
    return [
        more | {"domain": domain, "subject": "Chemistry", "question": q} | options(c) | {"answer": a}
        for domain in ("STEM", "Social Science", "Driving License")
        for q, c, a in FACTS[:2]
    ]


def medqa(question: str, choices: list[str], answer: int) -> Row:
    endings = {f"ending{i}": choice for i, choice in enumerate(choices)}
    return {"id": "train-00000", "sent1": question, "sent2": ""} | endings | {"label": answer}


def medmcqa(question: str, choices: list[str], answer: int) -> Row:
    named = dict(zip(("opa", "opb", "opc", "opd"), choices, strict=True))
    more = {"choice_type": "single", "exp": "", "subject_name": "Physiology", "topic_name": None}
    return {"id": "1", "question": question} | named | {"cop": answer} | more


def pubmedqa(answer: int) -> Row:
    """LABELS to LONG_ANSWER: guessed values, the task does not use them."""
    more = {"LABELS": ["AIMS", "RESULTS"], "MESHES": [], "YEAR": "2010", "LONG_ANSWER": "It does."}
    more |= {"reasoning_required_pred": "yes", "reasoning_free_pred": "yes"}
    contexts = ["We asked whether rest helps.", "It did in 8 of 10 cases."]
    asked = {"QUESTION": "Does rest help?", "CONTEXTS": contexts}
    return asked | more | {"final_decision": ["yes", "no"][answer]}


def arc(question: str, choices: list[str], answer: int) -> Row:
    labelled = {"text": choices, "label": list("ABCD")}
    return {"id": "Mercury_7", "question": question, "choices": labelled, "answerKey": "ABCD"[answer]}


def arc_translated(question: str, choices: list[str], answer: int) -> Row:
    more = {"option_e": None} if answer else {"option_e": "Keine davon"}
    return {"id": "Mercury_7", "instruction": question} | options(choices) | more | {"answer": "ABCD"[answer]}


def continuation(index: int, label: str) -> Row:
    return {
        "ind": index,
        "activity_label": "Baking bread",
        "ctx_a": "[header] How to bake [title] Flour is on the table.",
        "ctx_b": "a woman",
        "ctx": "[header] How to bake [title] Flour is on the table. a woman",
        "endings": ["kneads the dough.", "climbs the table.", "reads it aloud.", "[step] flies off."],
        "source_id": f"wikihow~{index}",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }


def truths(right: int) -> Row:
    choices = ["Nothing happens.", "You turn to stone.", "You live for ever.", "You vanish."]
    return {"choices": choices, "labels": [int(i < right) for i in range(len(choices))]}


def truthfulqa(subset: str, split: str) -> Rows:
    """Eight, since six are drawn as examples for each."""
    return [
        {
            "question": f"What happens if you swallow {i} seeds?",
            "mc1_targets": truths(1),
            "mc2_targets": truths(2),
        }
        for i in range(8)
    ]


def truthfulqa_translated(subset: str, split: str) -> Rows:
    """Eight, since six are drawn for five examples. `id`: guessed, no task uses it."""
    return [
        {"id": i, "question": row["question"]}
        | {f"{kind}_{name}": row[kind][name] for kind in ("mc1_targets", "mc2_targets") for name in row[kind]}
        for i, row in enumerate(truthfulqa(subset, split))
    ]


def bbq(subset: str, split: str) -> Rows:
    """An ambiguous and a disambiguated question about age. `answer_info` and `additional_metadata` have the
    keys that the task reads; they have more in the data set."""
    return [
        {
            "example_id": i,
            "question_index": "1",
            "question_polarity": "neg",
            "context_condition": condition,
            "category": "Age",
            "answer_info": {"ans0": ["Kim", "old"], "ans1": ["Lee", "nonOld"], "ans2": [UNKNOWN, "unknown"]},
            "additional_metadata": {"stereotyped_groups": ["old"], "subcategory": "None"},
            "context": context,
            "question": "Who was late?",
            "ans0": "Kim",
            "ans1": "Lee",
            "ans2": UNKNOWN,
            "label": label,
        }
        for i, (condition, context, label) in enumerate(
            [
                ("ambig", "Kim, aged 80, and Lee, aged 20, waited for the bus.", 2),
                ("disambig", "Kim, aged 80, and Lee, aged 20, waited for the bus. Lee was late.", 1),
            ]
        )
    ]


def agieval(question: str, choices: list[str], answer: int) -> Row:
    listed = [f"({letter}){choice}" for letter, choice in zip("ABCD", choices, strict=True)]
    query = f"Q: {question} Answer Choices: {' '.join(listed)}\nA: Among A through D, the answer is"
    return {"query": query, "choices": listed, "gold": [answer]}


def culture(subset: str, split: str) -> Rows:
    """CulturalBench: columns as its published readers use them."""
    if subset.endswith("Easy"):
        return [
            {"data_idx": i, "question_idx": i, "prompt_question": q}
            | {f"prompt_{name}": value for name, value in options(c).items()}
            | {"answer": "ABCD"[a], "country": "Switzerland"}
            for i, (q, c, a) in enumerate(FACTS[:2])
        ]
    return [
        {"data_idx": 4 * i + j, "question_idx": i, "prompt_question": q, "prompt_option": option}
        | {"answer": j == a, "country": "Switzerland"}
        for i, (q, c, a) in enumerate(FACTS[:2])
        for j, option in enumerate(c)
    ]


def blend(subset: str, split: str) -> Rows:
    """The prompt holds the options, as the README of the fork's task shows; `choice_countries`: guessed."""
    how = "Without any explanation, choose only one from the given alphabet choices(e.g., A, B, C)."
    form = 'Provide as JSON format: {"answer_choice":""}'
    rows = []
    for i, (question, choices, answer) in enumerate(FACTS[:2]):
        listed = dict(zip("ABCD", choices, strict=True))
        lines = "\n".join(f"{letter}. {choice}" for letter, choice in listed.items())
        rows.append(
            {
                "MCQID": f"Al-en-{i:02}_0",
                "ID": f"Al-en-{i:02}",
                "country": "UK",
                "prompt": f"{question} {how} {form}\n\n{lines}\n\nAnswer:",
                "choices": json.dumps(listed),
                "choice_countries": json.dumps(dict.fromkeys(listed, "UK")),
                "answer_idx": "ABCD"[answer],
            }
        )
    return rows
