"""Mutants of conversations: messages, chat templates, what is learned, the options of scripts."""

MESSAGES, DATA, SCRIPTS = (
    f"tests/{x}.py::test_" for x in ("data/test_messages", "data/test_data", "scripts/test_scripts")
)

MUTANTS = [
    (
        "the end of a turn is not learned",
        "rft_fn/data/chat.py",
        "        if last > start and ids[last - 1] in special:\n            return last",
        "        if last > start and ids[last - 1] in special:\n            return last - 1",
        MESSAGES + "turns_are_learned_with_their_ends",
    ),
    (
        "marks that leave out the end of a turn are followed",
        "rft_fn/data/chat.py",
        "            return end + 1\n",
        "            return end\n",
        MESSAGES + "turns_are_learned_with_their_ends",
    ),
    (
        "a turn that is rendered otherwise later is learned as it is then",
        "rft_fn/data/chat.py",
        "elif through[:end] == whole[:end]:",
        "elif len(through) <= len(whole):",
        MESSAGES + "a_turn_that_changes_when_others_follow_has_a_sequence_of_its_own",
    ),
    (
        "a token over the border of a turn is not cut",
        "rft_fn/data/chat.py",
        "        return len(asked), parted\n",
        "        return len(asked), through\n",
        MESSAGES + "an_answer_that_melts_into_its_header_is_cut_where_the_prompt_ends",
    ),
    (
        "few-shot answers are learned",
        "rft_fn/data/chat.py",
        "spoken = [i for i in _assistant_turns(talk.turns) if i >= talk.start]",
        "spoken = _assistant_turns(talk.turns)",
        MESSAGES + "only_the_last_column_is_learned_and_what_follows_the_last_answer_is_left_out",
    ),
    (
        "a system prompt that is refused is dropped",
        "rft_fn/data/chat.py",
        '"\\n\\n".join(filter(None, (text, content)))',
        "content",
        MESSAGES + "a_system_prompt_that_a_template_refuses_is_put_before_the_first_question",
    ),
    (
        "every keyword is taken",
        "rft_fn/data/chat.py",
        "            if name not in read:",
        "            if not name:",
        MESSAGES + "a_keyword_that_a_template_does_not_read_is_refused",
    ),
    (
        "a conversation that has its answer is answered again",
        "rft_fn/data/chat.py",
        'if role not in ("user", "tool"):',
        'if role not in ("user", "tool", "assistant"):',
        MESSAGES + "a_prompt_that_cannot_be_asked_is_refused",
    ),
    (
        "holes of a table stay in the calls of tools",
        "rft_fn/data/messages.py",
        'arguments = _solid(function.get("arguments") or {})',
        'arguments = function.get("arguments") or {}',
        MESSAGES + "messages_of_every_form_become_turns",
    ),
    (
        "lists are printed",
        "rft_fn/data/text_template.py",
        "isinstance(value, (Mapping, list, tuple))",
        "isinstance(value, Mapping)",
        DATA + "a_template_is_filled_or_refused",
    ),
    (
        "the limit of a conversation is not kept",
        "rft_fn/data/prompts.py",
        "len(lesson.ids) > self.max_tokens:",
        "len(lesson.ids) > 9 * self.max_tokens:",
        DATA + "conversations_above_the_limits",
    ),
    (
        "a mask is read from the front",
        "rft_fn/packing/rows.py",
        "        mask[i, : len(row)] = torch.tensor(learned)",
        "        mask[i, : len(row)] = torch.tensor(learned).flip(0)",
        "tests/loss/test_supervised_loss.py::test_a_conversation_with_two_turns_has_the_gradient_of_the_definition",
    ),
    (
        "evaluate does not give its keywords to the template",
        "rft_fn/run/setup.py",
        '"chat_template_kwargs": data.literals(cfg.chat_template_kwargs),',
        '"chat_template_kwargs": {},',
        SCRIPTS + "prompts_of_messages_go_through_the_chat_template[evaluate]",
    ),
]
