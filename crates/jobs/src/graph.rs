//! The graph of a job: its tasks and their dependencies, and the checks for a valid graph.

use std::collections::{HashMap, HashSet};

use everbus::{Code, Error, Result};

use crate::MAX_TASKS;
use crate::events::TaskSpec;
use crate::handle::check_id;

/// The tasks of a job in the order in which they were added, with their children.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    tasks: Vec<TaskSpec>,
    by_id: HashMap<String, usize>,
    children: Vec<Vec<usize>>,
    parents: Vec<Vec<usize>>,
}

impl Graph {
    /// The graph of a new job.
    pub fn new(tasks: Vec<TaskSpec>) -> Result<Self> {
        let mut graph = Self::default();
        graph.add(tasks)?;
        Ok(graph)
    }

    /// Adds tasks. Fails with `InvalidJob`, and changes nothing, if the graph would be invalid.
    pub fn add(&mut self, tasks: Vec<TaskSpec>) -> Result<()> {
        self.check(&tasks)?;
        let first = self.tasks.len();
        for (number, task) in (first..).zip(&tasks) {
            self.by_id.insert(task.task_id.clone(), number);
        }
        self.children.resize(first + tasks.len(), Vec::new());
        for (number, task) in (first..).zip(&tasks) {
            let parents = task.depends_on.iter().filter_map(|id| self.number(id));
            let mut parents: Vec<usize> = parents.collect();
            parents.sort_unstable();
            parents.dedup();
            for parent in &parents {
                self.children[*parent].push(number);
            }
            self.parents.push(parents);
        }
        self.tasks.extend(tasks);
        Ok(())
    }

    /// Checks whether tasks may be added. Fails with `InvalidJob` if the graph would be invalid.
    pub fn check(&self, new: &[TaskSpec]) -> Result<()> {
        if new.is_empty() {
            return Err(invalid("there are no tasks").hint("name at least one task"));
        }
        let total = self.tasks.len() + new.len();
        if total > MAX_TASKS {
            return Err(invalid(format!("the job would have {total} tasks"))
                .hint(format!("a job has at most {MAX_TASKS}; split it")));
        }
        let mut ids: HashSet<&str> = HashSet::with_capacity(new.len());
        for task in new {
            check_id("task id", &task.task_id)?;
            if task.name.is_empty() {
                let what = format!("the task {:?} has no name", task.task_id);
                return Err(invalid(what).hint("the name says which work it is: scrape-store"));
            }
            if !ids.insert(&task.task_id) || self.by_id.contains_key(&task.task_id) {
                return Err(invalid(format!("there are two tasks {:?}", task.task_id))
                    .hint("give every task of a job its own id"));
            }
        }
        for task in new {
            for parent in &task.depends_on {
                if *parent == task.task_id {
                    return Err(invalid(format!("the task {parent:?} depends on itself"))
                        .hint("take it out of its dependsOn"));
                }
                if !ids.contains(parent.as_str()) && !self.by_id.contains_key(parent) {
                    return Err(self.unknown(task, parent, &ids));
                }
            }
        }
        match cycle(new) {
            Some(cycle) => Err(invalid(format!(
                "the tasks depend on each other in a circle: {}",
                cycle.join(" → ")
            ))
            .hint("take one of these dependencies away")),
            None => Ok(()),
        }
    }

    fn unknown(&self, task: &TaskSpec, parent: &str, ids: &HashSet<&str>) -> Error {
        let what = format!(
            "{:?} depends on {parent:?}, which is no task of the job",
            task.task_id
        );
        let known = ids
            .iter()
            .copied()
            .chain(self.by_id.keys().map(String::as_str));
        let hint = match nearest(parent, known) {
            Some(near) => format!("did you mean {near:?}?"),
            None => "add the task, or take the dependency away".to_owned(),
        };
        invalid(what).hint(hint)
    }

    /// The tasks, in the order in which they were added.
    pub fn tasks(&self) -> &[TaskSpec] {
        &self.tasks
    }

    /// How many tasks there are.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether there are no tasks.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// The number of a task: its index in the order in which tasks were added.
    pub fn number(&self, id: &str) -> Option<usize> {
        self.by_id.get(id).copied()
    }

    /// The task with a number.
    pub fn task(&self, number: usize) -> &TaskSpec {
        &self.tasks[number]
    }

    /// The tasks that depend on a task.
    pub fn children(&self, number: usize) -> &[usize] {
        &self.children[number]
    }

    /// The tasks that a task depends on.
    pub fn parents(&self, number: usize) -> &[usize] {
        &self.parents[number]
    }

    /// The layer of each task: 0 for a task without parents, else one more than the highest layer of its parents.
    pub fn layers(&self) -> Vec<usize> {
        let mut layers = vec![0; self.len()];
        let mut missing: Vec<usize> = self.parents.iter().map(Vec::len).collect();
        let roots = (0..self.len()).filter(|number| missing[*number] == 0);
        let mut next: Vec<usize> = roots.collect();
        while let Some(number) = next.pop() {
            for child in &self.children[number] {
                layers[*child] = layers[*child].max(layers[number] + 1);
                missing[*child] -= 1;
                if missing[*child] == 0 {
                    next.push(*child);
                }
            }
        }
        layers
    }
}

/// The known name that is most similar to a misspelt name. `None` if no name is similar enough.
pub(crate) fn nearest<'a>(written: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.map(|name| (strsim::jaro_winkler(written, name), name));
    let best = near.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(a.1)))?;
    (best.0 > 0.8).then_some(best.1)
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(Code::InvalidJob, what)
}

/// Finds a cycle. Returns its tasks in order, with the first one again at the end. Only the new tasks are searched:
/// existing tasks do not depend on new ones.
fn cycle(tasks: &[TaskSpec]) -> Option<Vec<String>> {
    #[derive(Clone, Copy, PartialEq)]
    enum Seen {
        No,
        Open,
        Done,
    }
    let by_id: HashMap<&str, usize> = (0..)
        .zip(tasks)
        .map(|(n, task)| (task.task_id.as_str(), n))
        .collect();
    let mut seen = vec![Seen::No; tasks.len()];
    for start in 0..tasks.len() {
        if seen[start] != Seen::No {
            continue;
        }
        // Each entry: a task, and how many of its parents were visited. No recursion: a chain may be long.
        let mut path = vec![(start, 0)];
        seen[start] = Seen::Open;
        while let Some((task, visited)) = path.last_mut() {
            let Some(parent) = tasks[*task].depends_on.get(*visited) else {
                seen[*task] = Seen::Done;
                path.pop();
                continue;
            };
            *visited += 1;
            let Some(parent) = by_id.get(parent.as_str()).copied() else {
                continue;
            };
            match seen[parent] {
                Seen::Done => {}
                Seen::No => {
                    seen[parent] = Seen::Open;
                    path.push((parent, 0));
                }
                Seen::Open => {
                    let from = path.iter().position(|(task, _)| *task == parent)?;
                    let around = path[from..].iter().map(|(task, _)| *task).chain([parent]);
                    return Some(around.map(|n| tasks[n].task_id.clone()).collect());
                }
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Json;

    fn task(id: &str, depends_on: &[&str]) -> TaskSpec {
        TaskSpec {
            task_id: id.into(),
            name: "work".into(),
            depends_on: depends_on.iter().map(ToString::to_string).collect(),
            input: Json::empty(),
        }
    }

    fn refused(tasks: Vec<TaskSpec>) -> String {
        let error = Graph::new(tasks).unwrap_err();
        assert_eq!(error.code(), Code::InvalidJob);
        let hint = error.hint_text().unwrap_or_default();
        format!("{} ({hint})", error.message())
    }

    #[test]
    fn each_invalid_graph_is_refused_with_what_is_wrong() {
        assert!(refused(vec![]).contains("no tasks"));
        let twice = refused(vec![task("a", &[]), task("a", &[])]);
        assert!(twice.contains("two tasks \"a\""), "{twice}");
        let own = refused(vec![task("a", &["a"])]);
        assert!(own.contains("depends on itself"), "{own}");
        let unknown = refused(vec![task("scrape", &[]), task("b", &["scarpe"])]);
        assert!(unknown.contains("\"b\" depends on \"scarpe\""), "{unknown}");
        assert!(unknown.contains("did you mean \"scrape\"?"), "{unknown}");
        let many = (0..=MAX_TASKS).map(|n| task(&n.to_string(), &[])).collect();
        assert!(refused(many).contains("10001 tasks"));
    }

    #[test]
    fn a_cycle_is_named() {
        let tasks = vec![
            task("in", &[]),
            task("a", &["in", "c"]),
            task("b", &["a"]),
            task("c", &["b"]),
            task("out", &["c"]),
        ];
        let text = refused(tasks);
        assert!(text.contains("a → c → b → a"), "{text}");
    }

    #[test]
    fn a_long_chain_is_no_cycle_and_needs_no_stack() {
        let chain = (0..MAX_TASKS).map(|n| {
            let parent = n.checked_sub(1).map(|n| n.to_string());
            task(
                &n.to_string(),
                &parent.iter().map(String::as_str).collect::<Vec<_>>(),
            )
        });
        let graph = Graph::new(chain.rev().collect()).unwrap();
        assert_eq!(graph.layers().into_iter().max(), Some(MAX_TASKS - 1));
    }

    #[test]
    fn tasks_are_added_to_a_graph_that_knows_the_first_ones() {
        let mut graph = Graph::new(vec![task("a", &[])]).unwrap();
        assert!(graph.add(vec![task("a", &[])]).is_err());
        assert!(graph.add(vec![task("b", &["x"])]).is_err());
        assert_eq!(graph.len(), 1);
        graph
            .add(vec![task("c", &["b", "a", "a"]), task("b", &["a"])])
            .unwrap();
        assert_eq!(graph.children(0), [1, 2]);
        assert_eq!(graph.parents(1), [0, 2]);
        assert_eq!(graph.layers(), [0, 2, 1]);
    }
}
