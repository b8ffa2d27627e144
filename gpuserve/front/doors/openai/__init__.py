"""OpenAI's API over HTTP: bodies travel to a model and back as they are."""
