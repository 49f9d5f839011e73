"""Where rows go that give their memory back while they run, and how they come back."""
