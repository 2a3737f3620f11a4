"""Runs a plan: the Prefect flow, its server and pages, and the runner of one part."""
