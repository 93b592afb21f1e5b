"""Find a checkpoint, read it, and build the model, tokenizer and chat prompts it describes."""
