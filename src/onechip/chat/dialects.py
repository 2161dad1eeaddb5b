"""Built-in chat templates, for checkpoints that carry none (GGUF conversions often drop theirs). Text turns only.

A checkpoint's own template always wins: these state the published layouts, not an opinion. Names of pieces are checked
against the tokenizer when one is chosen.
"""

# No system role: its text goes before the first user text. Roles alternate strictly; anything else is an error.
GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
    {%- if not turns -%}
        {{ raise_exception('A system message needs a user message after it') }}
    {%- endif -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] == 'system' -%}
        {{ raise_exception('Only the first message may be a system message') }}
    {%- endif -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

# System messages are turns of their own; consecutive assistant messages share one model turn. `empty_thought` writes
# the closed thought channel that the larger models' templates put where thinking is off (E2B's and E4B's do not).
GEMMA4 = """\
{{ bos_token }}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- set before = loop.previtem['role'] if not loop.first else '' -%}
    {%- set after = loop.nextitem['role'] if not loop.last else '' -%}
    {%- if role != 'model' or before != 'assistant' -%}
        {{ '<|turn>' + role + '\\n' }}
    {%- endif -%}
    {{ message['content'] | trim }}
    {%- if role != 'model' or after != 'assistant' -%}
        {{ '<turn|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|turn>model\\n' }}
    {%- if empty_thought -%}
        {{ '<|channel>thought\\n<channel|>' }}
    {%- endif -%}
{%- endif -%}
"""
