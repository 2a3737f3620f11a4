"""From a recipe to a plan: parts with fingerprints, what is stored of them, what they would take. Neither torch nor Prefect."""
