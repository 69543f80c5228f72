//! Drawings of a job's graph: for a terminal, and as Graphviz, Mermaid and SVG.

use std::fmt::Write as _;

use crate::events::TaskState;
use crate::query::JobPicture;

const fn mark(state: Option<TaskState>) -> (&'static str, &'static str, &'static str) {
    match state {
        None => ("·", "waiting", "#d0d7de"),
        Some(TaskState::Pending) => ("○", "pending", "#9a6700"),
        Some(TaskState::Processing) => ("◐", "processing", "#0969da"),
        Some(TaskState::Completed) => ("●", "completed", "#1a7f37"),
        Some(TaskState::Failed) => ("✗", "failed", "#cf222e"),
    }
}

/// The positions of the boxes in a drawing: a column for each layer, with the tasks near their parents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The width of the drawing.
    pub width: usize,
    /// The height of the drawing.
    pub height: usize,
    /// The upper left corner of each task's box, in the order of the graph.
    pub places: Vec<(usize, usize)>,
}

impl Layout {
    /// The width and the height of a box.
    pub const BOX: (usize, usize) = (180, 44);
    /// The gap between two columns, and between two boxes of a column.
    const GAP: (usize, usize) = (60, 16);
    const MARGIN: usize = 20;
}

impl JobPicture {
    /// Lays the graph out from left to right. The tasks of a layer are in the order of their parents, so that few lines
    /// cross.
    pub fn layout(&self) -> Layout {
        let ((w, h), (gap_x, gap_y)) = (Layout::BOX, Layout::GAP);
        let layers = self.graph.layers();
        let mut columns: Vec<Vec<usize>> = Vec::new();
        for (number, layer) in layers.iter().enumerate() {
            if columns.len() <= *layer {
                columns.resize(layer + 1, Vec::new());
            }
            columns[*layer].push(number);
        }
        let tallest = columns.iter().map(Vec::len).max().unwrap_or(0);
        let mut places = vec![(0, 0); self.graph.len()];
        for (layer, column) in columns.iter_mut().enumerate() {
            let height_of_parents = |number: &usize| {
                let parents = self.graph.parents(*number);
                let sum: usize = parents.iter().map(|parent| places[*parent].1).sum();
                sum.checked_div(parents.len()).unwrap_or(0)
            };
            // The sort is stable: tasks with the same parents stay in the order of the job.
            column.sort_by_key(height_of_parents);
            // A short column is centred.
            let down = (tallest - column.len()) * (h + gap_y) / 2;
            for (row, number) in column.iter().enumerate() {
                let x = Layout::MARGIN + layer * (w + gap_x);
                let y = Layout::MARGIN + down + row * (h + gap_y);
                places[*number] = (x, y);
            }
        }
        Layout {
            width: 2 * Layout::MARGIN + (columns.len() * (w + gap_x)).saturating_sub(gap_x),
            height: 2 * Layout::MARGIN + (tallest * (h + gap_y)).saturating_sub(gap_y),
            places,
        }
    }

    /// The drawing for a terminal: layer by layer, each task with its state and its parents. Control characters are
    /// escaped.
    pub fn to_text(&self) -> String {
        let layers = self.graph.layers();
        let last = layers.iter().copied().max().unwrap_or(0);
        let width = self
            .graph
            .tasks()
            .iter()
            .map(|task| safe(&task.task_id).chars().count());
        let width = width.max().unwrap_or(0);
        let mut text = String::new();
        for layer in 0..=last {
            if layer > 0 {
                text.push_str("  │\n");
            }
            for number in (0..self.graph.len()).filter(|n| layers[*n] == layer) {
                let task = self.graph.task(number);
                let (symbol, word, _) = mark(self.states[number]);
                let id = safe(&task.task_id);
                let pad = " ".repeat(width - id.chars().count());
                let _ = write!(
                    text,
                    "  {symbol} {id}{pad}  {word:<10}  {}",
                    safe(&task.name)
                );
                if !task.depends_on.is_empty() {
                    let parents: Vec<String> = task.depends_on.iter().map(|id| safe(id)).collect();
                    let _ = write!(text, "  ← {}", parents.join(", "));
                }
                text.push('\n');
            }
        }
        text
    }

    /// The drawing as Graphviz (`dot -Tpng`).
    pub fn to_dot(&self) -> String {
        let mut text = format!(
            "digraph {} {{\n  rankdir=LR;\n  node [shape=box, style=rounded];\n",
            dot(&self.job_id)
        );
        for (number, task) in self.graph.tasks().iter().enumerate() {
            let (_, word, color) = mark(self.states[number]);
            let label = format!("{}\n{} ({word})", task.task_id, task.name);
            let _ = writeln!(
                text,
                "  n{number} [label={}, color=\"{color}\"];",
                dot(&label)
            );
        }
        for number in 0..self.graph.len() {
            for child in self.graph.children(number) {
                let _ = writeln!(text, "  n{number} -> n{child};");
            }
        }
        text.push_str("}\n");
        text
    }

    /// The drawing as Mermaid.
    pub fn to_mermaid(&self) -> String {
        let mut text = String::from("flowchart LR\n");
        for (number, task) in self.graph.tasks().iter().enumerate() {
            let (_, word, _) = mark(self.states[number]);
            let label = format!("{} ({word})", task.task_id);
            let _ = writeln!(text, "  n{number}[\"{}\"]:::{word}", entities(&label));
        }
        for number in 0..self.graph.len() {
            for child in self.graph.children(number) {
                let _ = writeln!(text, "  n{number} --> n{child}");
            }
        }
        for state in [None].into_iter().chain(TaskState::ALL.map(Some)) {
            let (_, word, color) = mark(state);
            let _ = writeln!(text, "  classDef {word} stroke:{color}");
        }
        text
    }

    /// The drawing as SVG: a column for each layer.
    pub fn to_svg(&self) -> String {
        let layout = self.layout();
        let (width, height, places) = (layout.width, layout.height, &layout.places);
        const W: usize = Layout::BOX.0;
        const H: usize = Layout::BOX.1;
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n"
        );
        for number in 0..self.graph.len() {
            let (x, y) = (places[number].0 + W, places[number].1 + H / 2);
            for child in self.graph.children(number) {
                let (to_x, to_y) = (places[*child].0, places[*child].1 + H / 2);
                let half = x + (to_x - x) / 2;
                let _ = writeln!(
                    text,
                    "<path d=\"M{x} {y} C{half} {y} {half} {to_y} {to_x} {to_y}\" fill=\"none\" stroke=\"#8c959f\"/>"
                );
            }
        }
        for (number, task) in self.graph.tasks().iter().enumerate() {
            let (x, y) = places[number];
            let (_, word, color) = mark(self.states[number]);
            let (id, name) = (
                entities(&short(&task.task_id)),
                entities(&short(&task.name)),
            );
            let (text_x, first, second) = (x + 10, y + 18, y + 34);
            let _ = writeln!(
                text,
                "<g><title>{}: {word}</title><rect x=\"{x}\" y=\"{y}\" width=\"{W}\" height=\"{H}\" rx=\"6\" \
                 fill=\"#ffffff\" stroke=\"{color}\" stroke-width=\"2\"/>\
                 <text x=\"{text_x}\" y=\"{first}\" font-weight=\"bold\">{id}</text>\
                 <text x=\"{text_x}\" y=\"{second}\" fill=\"#57606a\">{name}</text></g>",
                entities(&task.task_id)
            );
        }
        text.push_str("</svg>\n");
        text
    }
}

fn short(text: &str) -> String {
    match text.char_indices().nth(24) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Escapes the characters that a terminal interprets: control characters and invisible formatting characters.
fn safe(text: &str) -> String {
    let plain = |c: char| {
        !c.is_control()
            && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    let chars = text.chars().map(|c| match plain(c) {
        true => c.to_string(),
        false => c.escape_default().to_string(),
    });
    chars.collect()
}

/// Quotes a name for Graphviz.
fn dot(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('\n', "\\n"))
}

/// Escapes text for SVG and Mermaid.
fn entities(text: &str) -> String {
    let chars = text.chars().map(|c| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        c if c.is_control() => ' '.to_string(),
        c => c.to_string(),
    });
    chars.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Json, TaskSpec};
    use crate::graph::Graph;

    fn picture() -> JobPicture {
        let task = |id: &str, name: &str, depends_on: &[&str]| TaskSpec {
            task_id: id.into(),
            name: name.into(),
            depends_on: depends_on.iter().map(ToString::to_string).collect(),
            input: Json::empty(),
        };
        let tasks = vec![
            task("A", "scrape \"<store>\"", &[]),
            task("B", "analyze", &[]),
            task("C", "tags", &["A"]),
            task("E", "compile", &["C", "B"]),
        ];
        JobPicture {
            job_id: "job-1".into(),
            graph: Graph::new(tasks).unwrap(),
            states: vec![
                Some(TaskState::Completed),
                Some(TaskState::Processing),
                Some(TaskState::Failed),
                None,
            ],
        }
    }

    #[test]
    fn the_text_shows_layers_states_and_parents() {
        assert_eq!(
            picture().to_text(),
            "  ● A  completed   scrape \"<store>\"\n\
             \x20 ◐ B  processing  analyze\n\
             \x20 │\n\
             \x20 ✗ C  failed      tags  ← A\n\
             \x20 │\n\
             \x20 · E  waiting     compile  ← C, B\n"
        );
    }

    #[test]
    fn boxes_of_a_layer_stand_in_the_order_of_their_parents_and_none_overlap() {
        let task = |id: &str, depends_on: &[&str]| TaskSpec {
            task_id: id.into(),
            name: "work".into(),
            depends_on: depends_on.iter().map(ToString::to_string).collect(),
            input: Json::empty(),
        };
        // The children are named in the opposite order of their parents.
        let tasks = vec![
            task("a", &[]),
            task("b", &[]),
            task("of-b", &["b"]),
            task("of-a", &["a"]),
            task("end", &["of-a", "of-b"]),
        ];
        let picture = JobPicture {
            job_id: "job-1".into(),
            graph: Graph::new(tasks).unwrap(),
            states: vec![None; 5],
        };
        let layout = picture.layout();
        let [a, b, of_b, of_a, end] = layout.places[..] else {
            panic!("{layout:?}");
        };
        assert!(a.1 < b.1 && of_a.1 < of_b.1, "{layout:?}");
        assert_eq!((a.1, b.1), (of_a.1, of_b.1));
        assert_eq!(end.1, usize::midpoint(of_a.1, of_b.1), "in the middle");
        let apart = b.1 - a.1;
        assert!(apart > Layout::BOX.1, "{layout:?}");
        assert_eq!(layout.width, end.0 + Layout::BOX.0 + 20);
        assert_eq!(layout.height, b.1 + Layout::BOX.1 + 20);
    }

    #[test]
    fn the_reason_names_what_a_task_waits_for() {
        let picture = picture();
        let reason = |number| picture.reason(number, None);
        assert_eq!(reason(0), None);
        assert_eq!(reason(1).as_deref(), Some("a worker has it"));
        assert_eq!(reason(2).as_deref(), Some("has failed"));
        assert_eq!(reason(3).as_deref(), Some("cannot start: C failed"));
    }

    #[test]
    fn names_cannot_break_out_of_a_drawing() {
        let (dot, mermaid, svg) = (
            picture().to_dot(),
            picture().to_mermaid(),
            picture().to_svg(),
        );
        assert!(
            dot.contains("label=\"A\\nscrape \\\"<store>\\\" (completed)\""),
            "{dot}"
        );
        assert!(
            dot.contains("n0 -> n2;") && dot.contains("n1 -> n3;"),
            "{dot}"
        );
        assert!(
            mermaid.contains("n2 --> n3") && mermaid.contains(":::failed"),
            "{mermaid}"
        );
        assert!(
            svg.contains("&lt;store&gt;") && !svg.contains("<store>"),
            "{svg}"
        );
    }
}
