"""What scripts/quickstart does after the set-up: a pair of servers, one question, one line of proof."""
