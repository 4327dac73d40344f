"""Its place puts `tests/` on sys.path, so that every test file can `from models import GPT`."""
