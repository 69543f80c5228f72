//! The graph of a job as SVG: a column for each layer. The colours come from classes of the style sheet.

use everbus_jobs::events::TaskState;
use everbus_jobs::state::TaskStatus;
use everbus_jobs::{JobPicture, Layout};
use maud::{Markup, html};

/// How many characters fit into a box.
const FITS: usize = 19;

/// The name of a state; `waiting` for a task that has not begun.
pub(super) const fn word(state: Option<TaskState>) -> &'static str {
    match state {
        None => "waiting",
        Some(state) => state.as_str(),
    }
}

/// The badge of a state.
pub(super) fn badge(state: Option<TaskState>, cancelled: bool) -> Markup {
    let class = match state {
        None => "badge",
        Some(TaskState::Pending) => "badge warn",
        Some(TaskState::Processing) => "badge info",
        Some(TaskState::Completed) => "badge good",
        Some(TaskState::Failed) => "badge bad",
    };
    html! { span class=(class) { @if cancelled { "cancelled" } @else { (word(state)) } } }
}

/// Draws the graph. `link` makes the URL of a task.
pub(super) fn draw(
    picture: &JobPicture,
    statuses: &[TaskStatus],
    link: impl Fn(&str) -> String,
) -> Markup {
    let layout = picture.layout();
    let (w, h) = Layout::BOX;
    let graph = &picture.graph;
    html! {
        svg.dag role="img" aria-label={ "The graph of " (picture.job_id) } width=(layout.width) height=(layout.height)
            viewBox={ "0 0 " (layout.width) " " (layout.height) } {
            @for (from, (x, y)) in layout.places.iter().enumerate() {
                @let (x, y) = (x + w, y + h / 2);
                @let done = picture.states[from] == Some(TaskState::Completed);
                @for to in graph.children(from) {
                    @let (to_x, to_y) = (layout.places[*to].0, layout.places[*to].1 + h / 2);
                    @let half = usize::midpoint(x, to_x);
                    path class=(if done { "edge done" } else { "edge" })
                        d={ "M" (x) " " (y) " C" (half) " " (y) " " (half) " " (to_y) " " (to_x) " " (to_y) } {}
                }
            }
            @for (number, (x, y)) in layout.places.iter().enumerate() {
                @let task = graph.task(number);
                @let state = picture.states[number];
                a href=(link(&task.task_id)) data-task=(task.task_id) data-state=(word(state)) {
                    g class={ "node " (word(state)) } {
                        title {
                            (task.task_id) " (" (task.name) "): " (word(state))
                            @if let Some(reason) = picture.reason(number, statuses.get(number)) { "; " (reason) }
                        }
                        rect x=(x) y=(y) width=(w) height=(h) rx="8" {}
                        text x=(x + 12) y=(y + 19) { (short(own(&task.task_id, &picture.job_id))) }
                        text.state x=(x + 12) y=(y + 35) { (word(state)) " · " (short(&task.name)) }
                    }
                }
            }
        }
    }
}

/// The id of a task without the id of its job, which is often its prefix.
pub(super) fn own<'a>(task: &'a str, job: &str) -> &'a str {
    let rest = task.strip_prefix(job).unwrap_or(task);
    let rest = rest.trim_start_matches(['.', '-', '/', ':']);
    if rest.is_empty() { task } else { rest }
}

/// Shortens a text to its end: the tasks of a job often share the beginning of their ids.
fn short(text: &str) -> String {
    let length = text.chars().count();
    if length <= FITS {
        return text.to_owned();
    }
    let tail: String = text.chars().skip(length + 1 - FITS).collect();
    format!("…{tail}")
}

/// The progress of a job as a bar.
pub(super) fn progress(completed: usize, running: usize, failed: usize, total: usize) -> Markup {
    let share = |count: usize| count as f64 * 100.0 / total.max(1) as f64;
    let (done, now, bad) = (share(completed), share(running), share(failed));
    html! {
        svg.progress viewBox="0 0 100 8" preserveAspectRatio="none" role="img"
            aria-label={ (completed) " of " (total) " completed, " (failed) " failed" } {
            rect.track width="100" height="8" {}
            rect.good width=(format!("{done:.1}")) height="8" {}
            rect.info x=(format!("{done:.1}")) width=(format!("{now:.1}")) height="8" {}
            rect.bad x=(format!("{:.1}", done + now)) width=(format!("{bad:.1}")) height="8" {}
        }
    }
}
