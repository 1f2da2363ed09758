src/a.py
