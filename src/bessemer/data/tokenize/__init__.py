"""Text and conversations to token ids: byte-level BPE, chat formats, chat templates."""
