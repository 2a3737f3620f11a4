"""Files of the web that the code of tasks reads."""

from __future__ import annotations

from typing import Any

FILES: dict[str, Any] = {
    # the development sets of SQuAD 2.0 and HotpotQA; ruler asks 500 questions, so there are as many
    "rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json": {
        "version": "v2.0",
        "data": [
            {
                "title": f"Article {i}",
                "paragraphs": [
                    {
                        "context": f"Station {i}.{j} lies at kilometre {7 * i + j}.",
                        "qas": [
                            {
                                "id": f"{i}-{j}-{k}",
                                "question": f"Where does station {i}.{j} lie ({k})?",
                                "is_impossible": k == 5,
                                "answers": [{"text": f"kilometre {7 * i + j}", "answer_start": 20}],
                            }
                            for k in range(6)
                        ],
                    }
                    for j in range(5)
                ],
            }
            for i in range(20)
        ],
    },
    "namlh2004/hotpotqa/hotpot_dev_distractor_v1.json": [
        {
            "_id": f"{i}",
            "question": f"Who lives in house {i}?",
            "answer": f"Family {i}",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": [[f"House {i}", 0]],
            "context": [
                [f"House {i + j}", [f"Family {i + j} lives here.", " It is quiet."]] for j in range(10)
            ],
        }
        for i in range(500)
    ],
}
"""JSON files of the web that the code of tasks reads, by their paths below the data sets."""
