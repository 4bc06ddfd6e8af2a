"""``edgelin serve``: a bundle behind OpenAI's completions and chat-completions API.

The road of a request: :mod:`.app` takes it, :mod:`.requests` reads it, :mod:`.sessions` finds the
state it goes on from, :mod:`.engine` writes its texts beside all others, :mod:`.mailbox` hands them
over, :mod:`.answers` puts them into the API's JSON; :mod:`.process` is the server around it. The
extra ``serve`` brings what it needs.
"""
