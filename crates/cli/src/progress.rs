//! A progress bar for long work, on standard error and only on a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar for work with a known end, or a count that grows.
pub(crate) fn bar(what: &'static str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg} {wide_bar} {human_pos}/{human_len} {per_sec} {eta}",
        None => "{msg} {spinner} {human_pos} {per_sec}",
    };
    // Indicatif draws nothing where standard error is not a terminal.
    let bar = match total {
        Some(total) => ProgressBar::new(total),
        None => ProgressBar::no_length(),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

/// A spinner for work of unknown length.
pub(crate) fn spinner(what: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(what.into());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
