"""Continues a text with an exported model: python complete.py FOLDER TEXT"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer(text, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]))
