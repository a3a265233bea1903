"""From prompts to packed token rows: prompts, the target's responses, documents, packing, loaders."""
