"""Tasks of lm-evaluation-harness: needs, data, requests, scores and answers."""
