"""From a recipe to a plan: parts with fingerprints, their stored results, and estimates. Imports neither
torch nor Prefect."""
