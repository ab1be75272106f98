"""The page's own part in the browser: keeping a tab's conversation, and coming back after the page's server did.

Pure strings: knows no Gradio but the names of its elements. `kept.py` reads what KEEP wrote.

A tab's own storage (`sessionStorage`) is neither shared with other tabs nor does it outlive the tab. Where it is
forbidden or full, nothing is kept, and the page works as it would without.
"""

from __future__ import annotations

import json

from webui.kept import MAX_CHARS, MAX_DRAFT_CHARS, VERSION
from webui.texts import LABELS

# Somebody else who logs in here finds nothing.
_KEY = '"chatglm-tab:" + (window.gradio_config?.username ?? "") + ":"'
_BOX = "#question textarea"

# At the page's load: what the tab has kept, with the draft.
READ = f"""() => {{
  window.chatglmTab = true;
  try {{
    const kept = JSON.parse(sessionStorage.getItem({_KEY}) ?? "null") ?? {{version: {VERSION}, token: "", chat: []}};
    kept.draft = sessionStorage.getItem({_KEY} + "draft") ?? "";
    return [JSON.stringify(kept)];
  }} catch {{
    return [""];
  }}
}}"""

# The box is closed until then.
FOCUS = f"""() => {{ if (document.activeElement === document.body) document.querySelector("{_BOX}")?.focus(); }}"""

# When the daemon has taken a question, and when a conversation has changed otherwise: with (token, chat).
# NOTE: not before READ, which a component's first change could come before.
KEEP = f"""(token, chat) => {{
  if (!window.chatglmTab) return;
  const text = (content) => typeof content === "string" ? content
    : (Array.isArray(content) ? content : [content]).map((part) => part?.text ?? part ?? "").join("");
  const slim = (chat ?? []).filter((message) => message?.metadata?.id !== "waiting").map((message) => (
    {{role: message.role, text: text(message.content), note: message.metadata?.id ?? ""}}));
  try {{
    const kept = JSON.stringify({{version: {VERSION}, token: token ?? "", chat: slim}});
    if (slim.length && kept.length <= {MAX_CHARS}) sessionStorage.setItem({_KEY}, kept);
    else sessionStorage.removeItem({_KEY});
  }} catch {{
    try {{ sessionStorage.removeItem({_KEY}); }} catch {{ }}
  }}
}}"""

# The heartbeat is a response that lasts as long as the page's server: when it has ended, wait for a server, and load
# the page again. NOTE: Gradio itself does so only where a running event's stream breaks, not where it ends; and after
# a restart between two questions, the new server would know nothing of the conversation that is still on the screen.
WATCH = f"""() => {{
  const words = {json.dumps(LABELS["page_lost"], ensure_ascii=False)};
  const root = (window.gradio_config?.root ?? location.origin).replace(/\\/+$/, "");
  let isLost = false;
  const isThere = async () => {{
    try {{
      const report = await (await fetch(root + "/healthz", {{cache: "no-store"}})).json();
      return report.type === "health" && report.phase !== "stopping";
    }} catch {{
      return false;
    }}
  }};
  const comeBack = async () => {{
    if (!await isThere()) return setTimeout(comeBack, 1000);
    try {{ sessionStorage.setItem("chatglm-back", Date.now()); }} catch {{ }}
    location.reload();
  }};
  const delay = () => {{  // a proxy that ends every stream at once must not make a page that reloads for ever
    try {{
      return Date.now() - Number(sessionStorage.getItem("chatglm-back")) < 15000 ? 15000 : 1000;
    }} catch {{
      return 15000;
    }}
  }};
  addEventListener("pagehide", () => {{
    try {{
      const draft = document.querySelector("{_BOX}").value.slice(0, {MAX_DRAFT_CHARS});
      sessionStorage.setItem({_KEY} + "draft", draft);
    }} catch {{ }}
  }});
  new PerformanceObserver((list) => {{
    const ended = list.getEntries().find((entry) => entry.name.includes("/gradio_api/heartbeat/"));
    if (isLost || !ended || (ended.responseStatus ?? 200) !== 200) return;
    isLost = true;
    // The new server would not know what a question follows.
    document.querySelector("#question")?.setAttribute("inert", "");
    const note = document.createElement("div");
    note.id = "glm-lost";
    note.setAttribute("role", "status");
    note.textContent = words[navigator.language.startsWith("zh") ? 0 : 1];
    document.body.append(note);
    setTimeout(comeBack, delay());
  }}).observe({{type: "resource", buffered: true}});
}}"""
