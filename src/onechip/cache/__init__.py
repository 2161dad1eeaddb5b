"""Who owns which page of K/V memory. Plain integers; what the pages hold and who runs next is decided elsewhere."""
