"""Built-in chat templates, for checkpoints that carry none (GGUF conversions often drop theirs). Text and tool calls.

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

# System messages are turns of their own. A model turn stays open over its calls, their results and what follows them,
# and is closed by whatever comes next. Inside it: thought (after the last user message, or in a tool chain if
# preserve_thinking), text, calls, results. `empty_thought` writes the closed thought channel that the larger models'
# templates put where thinking is off (E2B's and E4B's do not). Schemas have been made plain by `tools.printable`.
GEMMA4 = """\
{%- macro value(v) -%}
    {%- if v is string -%}
        {{ '<|"|>' + v + '<|"|>' }}
    {%- elif v is boolean -%}
        {{ 'true' if v else 'false' }}
    {%- elif v is mapping -%}
        {{ '{' }}
        {%- for key, item in v | dictsort -%}
            {{ key + ':' + value(item) + ('' if loop.last else ',') }}
        {%- endfor -%}
        {{ '}' }}
    {%- elif v is sequence -%}
        {{ '[' }}
        {%- for item in v -%}
            {{ value(item) + ('' if loop.last else ',') }}
        {%- endfor -%}
        {{ ']' }}
    {%- else -%}
        {{ v }}
    {%- endif -%}
{%- endmacro -%}
{%- macro properties(s) -%}
    {{ 'properties:{' }}
    {%- for name, property in s['properties'] | dictsort -%}
        {{ name + ':{' + schema(property) + '}' + ('' if loop.last else ',') }}
    {%- endfor -%}
    {{ '},' }}
{%- endmacro -%}
{%- macro required(s) -%}
    {%- if s['required'] -%}
        {{ 'required:' + value(s['required']) + ',' }}
    {%- endif -%}
{%- endmacro -%}
{%- macro schema(s) -%}
    {%- if s['description'] -%}
        {{ 'description:' + value(s['description']) + ',' }}
    {%- endif -%}
    {%- if s['type'] == 'string' and s['enum'] -%}
        {{ 'enum:' + value(s['enum']) + ',' }}
    {%- elif s['type'] == 'array' and 'items' in s -%}
        {{ 'items:{' + schema(s['items']) + '},' }}
    {%- endif -%}
    {%- if s['nullable'] -%}
        {{ 'nullable:true,' }}
    {%- endif -%}
    {%- if s['type'] == 'object' -%}
        {{ properties(s) + required(s) }}
    {%- endif -%}
    {{ 'type:' + value(s['type'] | upper) }}
{%- endmacro -%}
{%- macro declaration(f) -%}
    {{ '<|tool>declaration:' + f['name'] + '{description:' + value(f['description']) }}
    {%- if f['parameters'] -%}
        {%- set p = f['parameters'] -%}
        {{ ',parameters:{' + (properties(p) if p['properties'] else '') + required(p) }}
        {{- 'type:' + value(p['type'] | upper) + '}' }}
    {%- endif -%}
    {{ '}<tool|>' }}
{%- endmacro -%}
{%- set first_is_system = messages[0]['role'] == 'system' -%}
{%- set turns = messages[1:] if first_is_system else messages -%}
{%- set ns = namespace(open=false, last='', user=-1) -%}
{%- for message in turns if message['role'] == 'user' -%}
    {%- set ns.user = message['at'] -%}
{%- endfor -%}
{{ bos_token }}
{%- if first_is_system or tools or enable_thinking -%}
    {{ '<|turn>system\n' + ('<|think|>\n' if enable_thinking else '') }}
    {%- if first_is_system -%}
        {{ messages[0]['content'] | trim }}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{ declaration(tool['function']) }}
    {%- endfor -%}
    {{ '<turn|>\n' }}
{%- endif -%}
{%- for message in turns -%}
    {%- if message['role'] == 'tool' -%}
        {{ '<|tool_response>response:' + message['name'] + '{value:' }}
        {{- value(message['content']) + '}<tool_response|>' }}
        {%- set ns.last = 'result' -%}
    {%- else -%}
        {%- if ns.open and (message['role'] != 'assistant' or ns.last == 'text') -%}
            {{ '<turn|>\n' }}
            {%- set ns.open = false -%}
        {%- endif -%}
        {%- if not ns.open -%}
            {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
            {%- set ns.open = true -%}
        {%- endif -%}
        {%- if message['reasoning'] and (message['at'] > ns.user
                or (preserve_thinking and message['tool_calls'])) -%}
            {{ '<|channel>thought\n' + message['reasoning'] + '\n<channel|>' }}
        {%- endif -%}
        {{ message['content'] | trim }}
        {%- set ns.last = 'text' -%}
        {%- for call in message['tool_calls'] or [] -%}
            {{ '<|tool_call>call:' + call['function']['name'] }}
            {{- value(call['function']['arguments']) + '<tool_call|>' }}
            {%- set ns.last = 'call' -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if ns.last == 'text' -%}
    {{ '<turn|>\n' }}
{%- endif -%}
{%- if add_generation_prompt -%}
    {%- if ns.last == 'call' -%}
        {{ '<|tool_response>' }}
    {%- elif ns.last == 'result' -%}
        {{ '<|channel>thought\n' if enable_thinking else '' }}
    {%- else -%}
        {{ '<|turn>model\n' }}
        {%- if empty_thought and not enable_thinking -%}
            {{ '<|channel>thought\n<channel|>' }}
        {%- endif -%}
    {%- endif -%}
{%- endif -%}
"""
