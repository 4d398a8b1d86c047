"""The live page of a study: a server that reads its journal, and the page in a browser."""
