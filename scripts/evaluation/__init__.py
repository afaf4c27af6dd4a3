"""Questions with a known answer, asked of an OpenAI-compatible endpoint: gsm8k, and what each lost component costs."""
