"""Every word that the page shows, in Chinese and English.

Pure data and two functions. `LABELS` are for the browser, which picks its own language; `SENTENCES` are said by the
server in the language that the browser prefers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Language = Literal["zh", "en"]

TITLE = "ChatGLM 对话"

# key -> (Chinese, English). What is between braces is filled in by `say`.
SENTENCES: Mapping[str, tuple[str, str]] = {
    # while waiting
    "queued": (
        "正在排队，前面还有 {ahead} 个请求，大约 {seconds} 秒后开始…",
        "Waiting: {ahead} ahead of you, starting in about {seconds} s…",
    ),
    "loading": (
        "模型正在加载（{percent}%），加载完会自动开始回答…",
        "The model is loading ({percent}%); the answer starts by itself when it is ready…",
    ),
    "reaching": ("暂时连不上模型服务，正在重试…", "The model service cannot be reached yet; trying again…"),
    "drain_notice": (
        "服务即将重启，这条回答最多还有 {seconds} 秒。",
        "The service is about to restart; this answer has up to {seconds} s left.",
    ),
    "restarting": (
        "服务正在重启，这条回答会自动继续…",
        "The service is restarting; the answer goes on by itself…",
    ),
    "restarting_loading": (
        "服务已重启，模型正在加载（{percent}%），这条回答会自动继续…",
        "The service has restarted and its model is loading ({percent}%); the answer goes on by itself…",
    ),
    "reconnecting": (
        "与模型服务的连接断开了，正在重新连接，这条回答会自动继续…",
        "The connection to the model service was lost; reconnecting, and the answer goes on by itself…",
    ),
    # ends that keep the answer
    "length": (
        "已到本次回答的长度上限（{tokens} 个 token），可以说“继续”。",
        "This answer reached its length limit ({tokens} tokens); you can say “go on”.",
    ),
    "deadline": (
        "已到 {seconds} 秒的时限，上面是已生成的内容。",
        "The time limit of {seconds} s was reached; what was written so far is kept.",
    ),
    "restarted": (
        "模型服务刚刚中断并自动重启，已生成的内容保留在上面；再发一条消息即可继续。",
        "The model service restarted during this answer; the text so far is kept, and the next message works.",
    ),
    "restarted_early": (
        "模型服务刚刚中断并自动重启，这个问题还没有回答；请重新发送。",
        "The model service restarted before it could answer; please send the question again.",
    ),
    "empty": ("模型没有给出任何文字，可以点“重试”。", "The model gave no text; you can press retry."),
    "stopped_by_reload": (
        "页面重新载入时停止了这条回答，已生成的内容保留在上面。",
        "Reloading the page stopped this answer; the text so far is kept.",
    ),
    "not_taken_up": (
        "页面重新载入后，这条回答已经接不上了；请重新发送问题。",
        "After the page was reloaded this answer could not be taken up again; please send the question once more.",
    ),
    "read_elsewhere": (
        "这条回答正在另一个标签页里显示。",
        "This answer is being shown in another tab.",
    ),
    "stopped_early": ("已停止，还没有开始回答。", "Stopped before the answer began."),
    # refusals and failures
    "busy": (
        "现在排队的人太多，请大约 {seconds} 秒后再试。",
        "Too many people are waiting right now; please try again in about {seconds} s.",
    ),
    "draining": (
        "服务正在停止或重启，请大约 {seconds} 秒后再试。",
        "The service is stopping or restarting; please try again in about {seconds} s.",
    ),
    "unreachable": (
        "连不上模型服务；请在服务器上运行 `supervisorctl -c supervisord.conf status` 查看它的状态。",
        "The model service cannot be reached; `supervisorctl -c supervisord.conf status` on the server shows why.",
    ),
    "still_loading": (
        "模型加载的时间超过了 {seconds} 秒（现在 {percent}%），请稍后再试。",
        "The model has been loading for more than {seconds} s ({percent}% now); please try again later.",
    ),
    "too_long": (
        "这条消息太长：需要 {needed} 个 token，最多只能放 {limit} 个；请缩短后再发。",
        "This message is too long: it takes {needed} tokens and at most {limit} fit; please shorten it.",
    ),
    "too_long_unmeasured": (
        "这条消息太长，放不进模型的上下文；请缩短后再发。",
        "This message is too long for the model's context; please shorten it.",
    ),
    "engine_failed": (
        "这次生成出错了，其他对话不受影响；请点“重试”。",
        "Generating this answer failed; nothing else is affected, please press retry.",
    ),
    "engine_dead": (
        "推理引擎出错，服务会自动重启；请稍后点“重试”。",
        "The engine failed and the service restarts by itself; please press retry in a moment.",
    ),
    "slow_client": (
        "网页接收得太慢，服务停止了这条回答；请点“重试”。",
        "The page could not keep up, so the service ended this answer; please press retry.",
    ),
    "forbidden": (
        "网页没有使用模型服务的权限；请检查套接字文件的用户组。",
        "The page may not use the model service; please check the group of its socket file.",
    ),
    "bad_request": ("服务不接受这个请求：{detail}", "The service did not accept this request: {detail}"),
    "unknown": ("服务报告了一个错误（{code}）。", "The service reported an error ({code})."),
    "page_failed": (
        "网页内部出错，详情见服务器日志；请点“重试”。",
        "The page itself failed, see the server's log; please press retry.",
    ),
    # the notice above the chat
    "dropped": (
        "为了放进上下文窗口，最早的 {turns} 轮对话没有发送给模型（界面里仍然保留）。",
        "To fit the context window, the oldest {turns} turn(s) were not sent to the model (they stay on the page).",
    ),
    # the status line
    "state_ready": ("就绪", "Ready"),
    "state_queued": ("排队中", "Waiting"),
    "state_loading": ("加载中", "Loading"),
    "state_restarting": ("重启中", "Restarting"),
    "state_reconnecting": ("重新连接", "Reconnecting"),
    "state_answering": ("生成中", "Answering"),
    "state_done": ("完成", "Done"),
    "state_stopped": ("已停止", "Stopped"),
    "state_error": ("出错", "Error"),
    "state_offline": ("未连接", "Offline"),
    "ttft": ("首字", "First token"),
    "ttft_help": (
        "从发送到看见第一个字；其中服务用了 {daemon} ms",
        "From sending to the first text; the service took {daemon} ms of it",
    ),
    "speed": ("速度", "Speed"),
    "tokens": ("已生成", "Tokens"),
    "queue": ("排队", "Queue"),
    "context": ("上下文", "Context"),
}

# key -> (Chinese, English), for the browser's own choice of language. Keys with a dot are Gradio's own.
LABELS: Mapping[str, tuple[str, str]] = {
    "subtitle": ("本地推理 · 数据不出本机", "Runs on this machine · your data stays here"),
    "greeting": ("你好，想聊点什么？", "Hello, what shall we talk about?"),
    "greeting_more": (
        "支持多轮对话、代码与公式。示例问题点一下即可发送。",
        "Conversations, code and formulas. Click an example to send it.",
    ),
    "page_lost": (
        "网页的服务器断开了，恢复后会自动接上…",
        "The page's server is away; this page comes back by itself…",
    ),
    "sampling": ("采样参数", "Sampling"),
    "preset": ("预设", "Preset"),
    "preset_default": ("模型默认", "Model's own"),
    "preset_precise": ("精确", "Precise"),
    "preset_balanced": ("均衡", "Balanced"),
    "preset_creative": ("创意", "Creative"),
    "preset_help": ("没有改动的参数用模型自己的默认值", "What you do not change stays at the model's own default"),
    "temperature": ("温度", "Temperature"),
    "top_p": ("top_p", "top_p"),
    "top_k": ("top_k（0 = 不限）", "top_k (0 = off)"),
    "max_new_tokens": ("最大 token 数", "Max tokens"),
    "repetition_penalty": ("重复惩罚", "Repetition penalty"),
    "chat_interface.chatbot": ("对话", "Chat"),
    "chat_interface.message_placeholder": ("输入消息（Enter 发送，Shift+Enter 换行）", "Type a message (Enter sends)"),
    "chat_interface.additional_inputs": ("采样参数", "Sampling"),
    "chat_interface.new_chat": ("新对话", "New chat"),
    "chat_interface.conversation": ("对话", "Conversation"),
}

# Questions to begin with; (Chinese, English).
EXAMPLES: tuple[tuple[str, str], ...] = (
    ("用 Python 写一个斐波那契函数", "Write a Fibonacci function in Python"),
    ("解释一下什么是 KV 缓存", "Explain what a KV cache is"),
    ("把这句话翻译成英文：山重水复疑无路", "Translate into Chinese: where there is a will, there is a way"),
    ("给我写一首关于秋天的小诗", "Write a short poem about autumn"),
)


def say(language: Language, key: str, **values: object) -> str:
    """One sentence in one language."""
    return SENTENCES[key][language == "en"].format(**values)


def labels(language: Language) -> dict[str, str]:
    """All labels in one language."""
    return {key: pair[language == "en"] for key, pair in LABELS.items()}


def preferred_language(accept_language: str) -> Language:
    """The browser's choice between the two, from its Accept-Language header: Chinese if it ranks above English.

    A browser that wants neither gets English.
    """
    best: tuple[float, Language] = (0.0, "en")
    for item in accept_language.lower().split(","):
        tag, _, weight = item.strip().partition(";q=")
        primary = tag.partition("-")[0]
        try:
            quality = float(weight) if weight else 1.0
        except ValueError:
            quality = 0.0
        if primary in ("zh", "en") and quality > best[0]:
            best = (quality, "zh" if primary == "zh" else "en")
    return best[1]
