//! Icons as SVG: lines on a 24 by 24 grid, in the colour of the text.

use maud::{Markup, PreEscaped, html};

/// The SVG of an icon with these paths.
fn icon(path: &'static str) -> Markup {
    html! {
        svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8"
            stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" {
            (PreEscaped(path))
        }
    }
}

macro_rules! icons {
    ($($name:ident $path:literal)*) => {
        $(pub(super) fn $name() -> Markup {
            icon($path)
        })*
    };
}

icons! {
    brand r#"<path d="M4 7h10M4 12h16M10 17h10"/><circle cx="18" cy="7" r="1.6"/><circle cx="6" cy="17" r="1.6"/>"#
    overview r#"<path d="M3 13h4l3 7 4-16 3 9h4"/>"#
    events r#"<path d="M8 6h12M8 12h12M8 18h12M4 6h.01M4 12h.01M4 18h.01"/>"#
    groups r#"<circle cx="9" cy="8" r="3.2"/><path d="M3 20c0-3.3 2.7-5.5 6-5.5s6 2.2 6 5.5M16 5.2a3.2 3.2 0 0 1 0 5.8M18 14.8c1.8.8 3 2.6 3 5.2"/>"#
    letters r#"<path d="M4 6h16v12H4zM4 7l8 6 8-6"/>"#
    jobs r#"<rect x="3" y="9" width="6" height="6" rx="1.5"/><rect x="15" y="3" width="6" height="6" rx="1.5"/><rect x="15" y="15" width="6" height="6" rx="1.5"/><path d="M9 12h3M15 6h-1.5a1.5 1.5 0 0 0-1.5 1.5v9a1.5 1.5 0 0 0 1.5 1.5H15"/>"#
    system r#"<path d="M4 8h9M17 8h3M4 16h3M11 16h9"/><circle cx="15" cy="8" r="2"/><circle cx="9" cy="16" r="2"/>"#
    theme r#"<path d="M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z"/>"#
    keyboard r#"<rect x="3" y="6" width="18" height="12" rx="2"/><path d="M7 10h.01M11 10h.01M15 10h.01M8 14h8"/>"#
    check r#"<path d="M5 13l4 4L19 7"/>"#
}
