"""A few rows of every data set that the tasks of shipped recipes read, by Hub id.

Columns are those that the harness's task files use (`doc_to_text`, `process_docs`, ...), in the types
that they need, and the others of the real data set as far as they are known. The texts are ours. Subsets and
splits are not here: `writer.py` takes them from the task files, so one that the real data set does not have
would not be noticed.
"""

from __future__ import annotations

from tests.snapshots.generation import (
    acp,
    drop,
    gpqa,
    gsm8k,
    gsm8k_platinum,
    hendrycks_math,
    humaneval,
    ifeval,
    mbpp,
    mgsm,
    toxicity,
    toxigen,
)
from tests.snapshots.multiple_choice import (
    FACTS,
    agieval,
    arc,
    arc_translated,
    bbq,
    blend,
    continuation,
    culture,
    global_mmlu,
    include_44,
    medmcqa,
    medqa,
    mmlu,
    of_facts,
    options,
    pubmedqa,
    truthfulqa,
    truthfulqa_translated,
)
from tests.snapshots.table import Table, always


def tables(mmlu_subjects: list[str]) -> dict[str, Table]:
    """All tables. `mmlu_subjects`: of the tasks that are filters of one table."""
    multiple_choice = of_facts(agieval)
    cloze = always(
        *({"query": f"Q: What is {i} + {i}?\nA: The answer is", "answer": f"{2 * i}"} for i in (2, 3))
    )
    exams = "gaokao-biology gaokao-chemistry gaokao-chinese gaokao-english gaokao-geography gaokao-history"
    exams += " gaokao-mathqa gaokao-physics jec-qa-ca jec-qa-kd logiqa-en logiqa-zh lsat-ar lsat-lr lsat-rc"
    exams += " aqua-rat sat-en sat-en-without-passage sat-math"
    return {
        **{f"hails/agieval-{exam}": multiple_choice for exam in exams.split()},
        "hails/agieval-math": cloze,
        "hails/agieval-gaokao-mathcloze": cloze,
        "allenai/ai2_arc": of_facts(arc),
        "alexandrainst/m_arc": of_facts(arc_translated, 3),
        "Rowan/hellaswag": always(continuation(0, "0"), continuation(1, "3")),
        "alexandrainst/m_hellaswag": always(continuation(0, "0"), continuation(1, "3")),
        "alexandrainst/m_truthfulqa": truthfulqa_translated,
        "truthfulqa/truthful_qa": truthfulqa,
        "allenai/winogrande": always(
            {
                "sentence": "The cup did not fit into the bag because the _ was large.",
                "option1": "cup",
                "option2": "bag",
                "answer": "1",
            },
            {
                "sentence": "The cup did not fit into the bag because the _ was small.",
                "option1": "cup",
                "option2": "bag",
                "answer": "2",
            },
        ),
        "baber/piqa": always(
            {
                "goal": "Dry a wet shoe.",
                "sol1": "Fill it with paper.",
                "sol2": "Fill it with water.",
                "label": 0,
            },
            {"goal": "Cool soup.", "sol1": "Heat it.", "sol2": "Stir it.", "label": 1},
        ),
        "facebook/xnli": always(
            {"premise": "Sie liest ein Buch", "hypothesis": "Sie kann lesen", "label": 0},
            {"premise": "他睡着了", "hypothesis": "他在跑步", "label": 2},
        ),
        "cambridgeltl/xcopa": always(
            {
                "premise": "L'acqua gelò.",
                "choice1": "Faceva freddo.",
                "choice2": "Faceva caldo.",
                "question": "cause",
                "label": 0,
                "idx": 0,
                "changed": False,
            },
            {
                "premise": "灯灭了。",
                "choice1": "屋里亮了。",
                "choice2": "屋里黑了。",
                "question": "effect",
                "label": 1,
                "idx": 1,
                "changed": False,
            },
        ),
        "cais/mmlu": mmlu,
        "GBaker/MedQA-USMLE-4-options-hf": of_facts(medqa, 5),
        "openlifescienceai/medmcqa": of_facts(medmcqa, 5),
        "bigbio/pubmed_qa": always(*(pubmedqa(row % 2) for row in range(5))),
        "CohereForAI/Global-MMLU": global_mmlu(mmlu_subjects),
        "CohereForAI/include-base-44": include_44,
        "oskarvanderwal/bbq": bbq,
        "Idavidrein/gpqa": of_facts(gpqa),
        "openai/gsm8k": gsm8k,
        "madrylab/gsm8k-platinum": gsm8k_platinum,
        "juletxara/mgsm": mgsm,
        "google/IFEval": ifeval,
        "regisss/math_qa": always(
            *(
                {
                    "Problem": f"what is {i} times 3 ?",
                    "Rationale": "we multiply .",
                    "options": f"a ) {3 * i} , b ) {i} , c ) 30 , d ) 38 , e ) none of these",
                    "correct": "a",
                    "annotated_formula": f"multiply({i}, 3)",
                    "linear_formula": "multiply(n0,n1)|",
                    "category": "general",
                }
                for i in (2, 5)
            )
        ),
        "allenai/real-toxicity-prompts": toxicity,
        "skg/toxigen-data": toxigen,
        "ibm-research/acp_bench": acp,
        "SaylorTwift/bbh": always(
            {"input": "not ( True ) and ( True ) is", "target": "False"},
            {"input": "True or ( False and True ) is", "target": "True"},
        ),
        "EleutherAI/drop": drop,
        "EleutherAI/hendrycks_math": hendrycks_math,
        "EleutherAI/lambada_openai": always(
            {"text": "he took the umbrella , since there was rain"}, {"text": "she gave the dog its bone"}
        ),
        "EleutherAI/wikitext_document_level": always(
            {"page": " = Rain = \n\n Rain is water that falls from clouds . \n"},
            {"page": " = Bread = \n\n Bread is baked . \n"},
        ),
        # read by ruler's code, not named in its task files
        "baber/paul_graham_essays": always(
            *({"text": "One reads. One writes a sentence more, and then another. " * 400} for _ in range(2))
        ),
        # of examples/tasks; columns are those that the fork's task files read, `canton` is guessed
        "swiss-ai/switzerland_qa": always(
            *(
                {"question": q} | options(c) | {"answer": "ABCD"[a], "topic": topic, "canton": "Bern"}
                for topic in ("geography", "history", "insurance", "political_life", "social_life")
                for q, c, a in FACTS[:2]
            )
        ),
        "kellycyy/CulturalBench": culture,
        "nayeon212/BLEnD": blend,
        "openai/openai_humaneval": humaneval,
        "google-research-datasets/mbpp": mbpp,
    }
