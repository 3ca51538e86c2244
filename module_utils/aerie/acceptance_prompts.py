# SPDX-License-Identifier: Apache-2.0
"""The prompts that the live gate sends if it is given none: six kinds of text, in turn.

Acceptance differs much between kinds of text, so any first half of the list holds as much of each as the whole.
A change here ends the comparison with what earlier releases measured, until the next one has passed.
"""

from __future__ import annotations

from itertools import chain

_CODE = (
    "Write a Python function that returns the longest common prefix of a list of strings.",
    "Explain what this does, then rewrite it without recursion: def f(n): return n if n < 2 else f(n-1) + f(n-2)",
    "Write a SQL query for the three best paid employees of each department, ties included.",
    "Implement an LRU cache in Go with Get and Put in constant time.",
    "This shell loop breaks on names with spaces; mend it: for f in $(ls *.txt); do mv $f $f.bak; done",
    "Write a C function that reverses a singly linked list in place, with a comment on each step.",
    "Write TypeScript types for a tree of comments with authors, times and replies, and a function counting them.",
    "Write a unit test for a function slugify(title) that makes the last part of a web address.",
)
_PROSE = (
    "Tell the story of a lighthouse keeper who finds a letter that is addressed to her, dated next year.",
    "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "Summarise the causes and the course of the French Revolution in two paragraphs.",
    "Describe a market in the early morning so that one can smell it.",
    "Write a polite letter to a landlord about a heating that has not worked for a week.",
    "What are the strongest arguments for and against a four-day working week?",
    "Explain how vaccines work, and why some need to be repeated.",
    "Write the opening paragraph of a detective novel that is set in a library.",
)
_NUMBERS = (
    "A train leaves at 9:40 at 80 km/h, another from the same place at 10:10 at 120 km/h. When does it catch up?",
    "Compute 37 * 48 - 1296 / 12 step by step.",
    "List the squares of the numbers from 11 to 25.",
    "A shop takes 15 % off a price of 240, then adds 19 % tax. What is to be paid? Show each step.",
    "How many ways are there to seat five people at a round table if two of them refuse to sit together?",
    "Find all x with 2x^2 - 7x + 3 = 0 and check them.",
    "Convert 1011011 from binary to decimal, and 2026 from decimal to hexadecimal. Show how.",
    "The mean of six numbers is 14. Five of them are 10, 12, 13, 17 and 19. Find the sixth and the median.",
)
_LANGUAGES = (
    "请用中文解释一下什么是人工智能, 并举两个日常生活中的例子。",
    "Erkläre auf Deutsch, wie ein Kühlschrank funktioniert.",
    "Écris en français une courte recette de soupe à l'oignon.",
    "Explica en español las diferencias entre los verbos ser y estar, con ejemplos.",
    "日本の四季について、それぞれの特徴を日本語で説明してください。",
    "Расскажи по-русски, почему зимой дни короче, чем летом.",
    "اشرح باللغة العربية فوائد القراءة اليومية للأطفال.",
    "Translate into Portuguese and then into Italian: The meeting was moved to Tuesday because the train was late.",
)
_STRUCTURE = (
    "Return a JSON object that describes a book with title, author, year and a list of three chapters. JSON only.",
    "Make a Markdown table of the planets with their diameter in kilometres and their number of moons.",
    "Write a YAML file for a service with two replicas, a port, three environment variables and a health check.",
    "Give a numbered checklist of ten steps for moving to another flat.",
    "Write a CSV with a header and eight rows of invented orders: id, date, customer, item, quantity, price.",
    "Draw up a weekly timetable for a student with five courses as a table.",
    "Write an HTML form with name, e-mail, a choice of three subjects and a text field, with labels.",
    "Extract as JSON the people, places and dates: On 3 May 1912 Anna Berg left Oslo for Turin to meet Carlo Rossi.",
)
_TALK = (
    "Hello! Who are you, and what can you help me with?",
    "I have to give my first talk next week and I am nervous. What should I do?",
    "Recommend three books for somebody who liked The Hobbit, and say why.",
    "My cat wakes me at five every morning. What can I do about it?",
    "Plan a weekend in Lisbon for two people who like food and music.",
    "What is the difference between a virus and a bacterium?",
    "Give me five names for a small bakery, and tell me which you like best.",
    "Should I learn the piano or the guitar at forty? Ask me what you need to know first.",
)

PROMPTS = tuple(chain.from_iterable(zip(_CODE, _PROSE, _NUMBERS, _LANGUAGES, _STRUCTURE, _TALK)))
