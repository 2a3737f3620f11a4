"""A process that runs vLLM, for `apertus_model.generation`. vLLM needs other releases of FastAPI and torch
than this project, so it has a separate environment, whose interpreter runs this file: it imports only the
standard library and vLLM.

Standard input has a line of JSON with the arguments of the engine and of sampling, then one for each batch:
`{"prompts": [[ids]], "seeds": [int]}`. Standard output has `{}`, or `{"error": text}` where vLLM cannot be
imported, then one for each batch: the ids of the completions of each prompt, `[[[ids]]]`. Output of vLLM goes
to standard error.

Invariant: the process ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any


def main(lines: IO[str], answers: IO[str]) -> None:
    """Answers line after line."""

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    stated = json.loads(lines.readline())
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        say({"error": str(error)})
        return
    model = LLM(**stated["engine"])
    say({})
    for line in lines:
        batch = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        parameters = [SamplingParams(**stated["sampling"], seed=seed) for seed in batch["seeds"]]
        found = model.generate(prompts, parameters, use_tqdm=False)
        say([[list(output.token_ids) for output in answer.outputs] for answer in found])


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, own)
