"""What only Chat Completions have: conversations, tools and reasoning."""
