"""Speed, measured in turns so that a busy machine disturbs all variants alike: the server, transformers, Mooncake."""
