"""How the page looks: its style sheet, and views as small pieces of HTML.

Pure strings: knows no Gradio and no daemon. Every text from outside goes through `html.escape`.
"""

from __future__ import annotations

from html import escape

from service.protocol import HealthReport
from webui.texts import TITLE, Language, say
from webui.view import View

# Fonts of the reader's machine, nothing from elsewhere. Emoji come before system-ui, which draws some of them in
# black, and after a font that has digits, which the emoji font would draw as keys.
FONTS = ("Noto Sans", "Segoe UI", "Helvetica Neue", "Arial", "Noto Color Emoji", "system-ui", "sans-serif")

# What Gradio 6's own layout needs: a 100dvh page in which only the chat scrolls (`min-height: 0` along its flex
# chain), a container that does not change its width while text streams in, and an accordion that never eats the chat.
CSS = """
.gradio-container { height: 100dvh; width: 100%; max-width: 920px !important; margin: 0 auto !important; }
.gradio-container > .main, .gradio-container .wrap:has(> .contain), .gradio-container .contain,
.contain > .column, #page, #page-top, #page-top > .column { min-height: 0; }
.gradio-container > .main { height: 100dvh; padding: 12px 20px !important; }
.contain > .column, #page { flex: 1 1 0 !important; flex-wrap: nowrap; gap: 10px; }
#page-top { flex: 1 1 0 !important; flex-wrap: nowrap; gap: 10px; }
#page-top > .column { flex: 1 1 0 !important; flex-wrap: nowrap; gap: 10px; }
#page-bottom { flex: 0 0 auto !important; gap: 8px; flex-wrap: nowrap; }
#chat { flex: 1 1 0 !important; min-height: 0 !important; height: auto !important; }
#sampling { max-height: 38dvh; overflow-y: auto; }
.block:has(> .html-container .glm-none) { display: none !important; }

#glm-header .html-container, #glm-notice .html-container, #glm-status .html-container { padding: 0 12px !important; }
#glm-header { margin: 8px 0 6px; }
.glm-top { display: flex; align-items: center; justify-content: space-between; gap: 12px; }
.glm-top h1 { font-size: 20px; line-height: 1.3; margin: 0; font-weight: 700; color: var(--body-text-color); }
.glm-sub { font-size: 13px; color: var(--body-text-color-subdued) !important; }
.glm-badge { border: 1px solid var(--border-color-primary); border-radius: 999px; padding: 2px 10px; font-size: 12px;
  color: var(--body-text-color-subdued) !important; background: var(--background-fill-secondary);
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; min-width: 0; }

.glm-notice { background: #fef3c7; border: 1px solid #fde68a; color: #92400e !important; border-radius: 8px;
  padding: 7px 12px; font-size: 13px; }
.dark .glm-notice { background: #422006; border-color: #713f12; color: #fde68a !important; }

.glm-status { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 16px; font-size: 13px;
  min-height: 22px; font-variant-numeric: tabular-nums; }
.glm-status > span { color: var(--body-text-color-subdued) !important; }
.glm-status b { font-weight: 500; color: var(--body-text-color); margin-left: 4px; }
.glm-status > .glm-state { color: var(--body-text-color) !important; min-width: 84px; }
.glm-dot { display: inline-block; width: 8px; height: 8px; border-radius: 50%; margin-right: 6px; background: #94a3b8; }
.glm-dot.answering { background: #22c55e; }
.glm-dot:is(.queued, .loading, .restarting, .reconnecting) { background: #f59e0b; }
.glm-dot.error, .glm-dot.offline { background: #ef4444; }
.glm-bar { display: inline-block; width: 72px; height: 5px; border-radius: 3px; margin-left: 8px; overflow: hidden;
  background: var(--border-color-primary); vertical-align: middle; }
.glm-bar i { display: block; height: 100%; background: #3b82f6; }
.glm-bar i.full { background: #f59e0b; }

#glm-lost { position: fixed; inset: auto 0 0 0; z-index: 10000; text-align: center; padding: 8px 12px; font-size: 14px;
  background: #fef3c7; color: #92400e; border-top: 1px solid #fde68a; }
body:has(#glm-lost) :is(.toast-wrap, [data-testid="status-tracker"]) { display: none !important; } /* said once */

.glm-hello { text-align: center; text-wrap: balance; }
.glm-hello h2 { font-size: 20px; font-weight: 700; margin: 0 0 12px; }
.glm-hello p { font-size: 14px; margin: 0; }
.glm-hello p { color: var(--body-text-color-subdued) !important; }
#chat .message-content { contain: paint; } /* no answer can draw over the page, whatever HTML it holds */
#chat .examples { max-width: 534px; margin: 0 auto; grid-template-columns: 1fr 1fr !important; }

@media (max-width: 640px) {
  .gradio-container > .main { padding: 8px !important; }
  .glm-sub, .glm-extra { display: none; }
  .glm-top h1 { font-size: 17px; }
  .glm-status { gap: 2px 10px; }
  .glm-status > .glm-state { min-width: 0; }
  .glm-bar { width: 44px; }
}
"""

NOTHING = '<span class="glm-none"></span>'


def header(report: HealthReport | None, subtitle: str, language: Language) -> str:
    """Title, subtitle, and a badge that names the model, its quantisation and its device."""
    if report is None:
        badge = say(language, "state_offline")
    else:
        parts = [report.model.rstrip("/").rpartition("/")[2], report.quantization.upper(), report.device.upper()]
        if report.phase == "loading":
            parts = [parts[0], f"{say(language, 'state_loading')} {report.progress:.0%}"]
        badge = " · ".join(part for part in parts if part)
    return (
        f'<div class="glm-top"><div><h1>{escape(TITLE)}</h1><div class="glm-sub">{escape(subtitle)}</div></div>'
        f'<div class="glm-badge" title="{escape(badge)}">{escape(badge)}</div></div>'
    )


def greeting(title: str, more: str) -> str:
    return f'<div class="glm-hello"><h2>{escape(title)}</h2><p>{escape(more)}</p></div>'


def notice(view: View, language: Language) -> str:
    """What stands above the chat while old turns do not fit the context."""
    if not view.dropped_turns:
        return NOTHING
    return f'<div class="glm-notice" role="status">✂️ {escape(say(language, "dropped", turns=view.dropped_turns))}</div>'


def idle_status(report: HealthReport | None, language: Language) -> str:
    """The status line before the first question."""
    if report is None:
        return _line("offline", View(), language)
    view = View(queue_position=report.queued, context_limit=report.context_limit)
    return _line("loading" if report.phase == "loading" else "ready", view, language)


def status(view: View, language: Language) -> str:
    """The status line under the text box."""
    return _line(view.state, view, language)


def _line(state: str, view: View, language: Language) -> str:
    def item(key: str, value: str, extra: str = "", css: str = "") -> str:
        return f'<span class="{css}">{say(language, key)}<b>{value}</b>{extra}</span>'

    ttft = "–" if view.ttft_ms is None else f"{view.ttft_ms:.0f} ms"
    help = "" if view.daemon_ttft_ms is None else say(language, "ttft_help", daemon=round(view.daemon_ttft_ms))
    speed = "–" if view.tokens_per_s is None else f"{view.tokens_per_s:.1f} tok/s"
    used = view.context_used
    context = f"{used}/{view.context_limit}" if used else "–"
    share = min(1.0, used / view.context_limit) if view.context_limit else 0.0
    bar = f'<span class="glm-bar"><i class="{"full" if share > 0.9 else ""}" style="width:{share:.0%}"></i></span>'
    return (
        f'<div class="glm-status" data-state="{state}">'
        f'<span class="glm-state"><span class="glm-dot {state}"></span>{say(language, "state_" + state)}</span>'
        f'<span title="{escape(help)}">{say(language, "ttft")}<b>{ttft}</b></span>'
        + item("speed", speed)
        + item("tokens", str(view.tokens or "–"), css="glm-extra")
        + item("queue", str(view.queue_position), css="glm-extra")
        + item("context", context, bar)
        + "</div>"
    )


def bubble(view: View) -> str:
    """The page's own sentence in the chat, "" when there is none. It is Markdown."""
    if not view.sentence:
        return ""
    mark = "⏳" if not view.is_finished else "⚠️" if view.state == "error" else "ℹ️"
    return f"{mark} {view.sentence}"
