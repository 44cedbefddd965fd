"""An agent that is a program of its own."""

import sys

import openai

messages = [{"role": "user", "content": "hello"}]
reply = openai.OpenAI().chat.completions.create(model="policy", messages=messages)
text = reply.choices[0].message.content
print("the policy writes", text, file=sys.stderr)
print(len(text) / 10)
