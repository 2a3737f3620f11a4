"""Makes a plan from a recipe: parts with fingerprints, their stored results, and estimates. Imports neither
torch nor Prefect."""
